"""What models write at the end, the reference, and whether the one says the other. ¶ stands for the end of a line."""

from __future__ import annotations

_RIGHT = r"""
\boxed{\{x | 1<x<3\}} || (1,3)
\boxed{\{x | |x|<3\}} || (-3,3)
The answer is 5. Wait, no. The answer is 6. || 6
18 (not 5) || 18
The answer is 18 (not 5) || 18
The answer is "18" || 18
"18" || 18
_18_ || 18
The answer is _18_. || 18
\boxed{2} and \boxed{3} || 2, 3
So x is \boxed{2} or \boxed{3}. || 2, 3
\boxed{2} and \boxed{3} || 3
\boxed{\text{cat}} || \text{cat}
\boxed{1,234} || 1, 234
\boxed{1, 234} || 1, 234
\boxed{2\pi i} || 2i\pi
\boxed{x^2<4} || -2<x<2
\boxed{\{x \mid x>2\}} || x>2
\boxed{x>1 and x<3} || (1,3)
\boxed{x>1 \text{ and } x<3} || 1<x<3
So 18.¶¶#### 18 || 20 - 2 = <<20-2=18>>18¶#### 18
Therefore, $m+n = 12 + 5 = \boxed{017}$ || 17
Yes, it is. || Yes
The answer is yes. || Yes
Answer: C || C
The correct answer is **C**. || C
The correct answer is (C) 12. || C
**C) 12** || C
C. 12 || \text{C}
Answer: \boxed{\textbf{(C)}\ 12} || C
The final answer is $\boxed{\dfrac{9}{2}}$. || 4.5
The answer is approximately 3.14. || 3.14
\boxed{3} and \boxed{2} || 2, 3
\boxed{2}, \boxed{3}, and \boxed{5} || 2,3,5
So $x=\boxed{2}$ and $x=\boxed{3}$. || 2, 3
So $x_1=\boxed{2}$ or $x_2=\boxed{3}$. || 2, 3
$\boxed{2}$ and $\boxed{3}$ || \{2,3\}
First \boxed{1}. So \boxed{2} and \boxed{3}. || 2,3
First \boxed{1}, 2. Then \boxed{2, 3} || 2,3
\boxed{2} and \boxed{2, 3} || 2,3
\boxed{\boxed{2} and \boxed{3}} || 2,3
\boxed{2} and \boxed{-2} || \pm 2
\boxed{(1,2)} and \boxed{(3,4)} || (1,2),(3,4)
\boxed{1,234} and \boxed{2,345} || 1234, 2345
The answer is x+1. I hope the answer is correct. || x+1
The answer is 5. I hope the answer is correct. || 5
The answer is not 5 but 6. || 6
The answer is 6. The answer is not 5. || 6
It is not 5. It is 6. || 6
It is 6, not 5. || 6
The answer is 6, not 5. || 6
The answer is 6 rather than 5. || 6
So we get 6 instead of 5 || 6
The answer is 5 or 6. || 5, 6
The answer is 5. No wait, it is 6. || 6
The answer is 5. Actually, it should be 6. || 6
Answer: 5¶Wait, that's wrong. Answer: 6 || 6
The answer is 18. The answer to part b is 20. || 20
The total answer is 18 because the result is 9 for each. || 18
The answer is $\frac{1}{2}$. This is the result of 3 divided by 6. || 1/2
The answer is 18. The result was checked twice. || 18
The answer is 18 (the result is exact). || 18
So the answer is $x=3$, and the result is verified. || 3
The answer is \boxed{18}, which is not 17. || 18
He has 12 eggs, which is not 10. || 12
There are not 5 but 6 apples. || 6
x is not 0, so the answer is 4 || 4
Therefore the answer is not zero; the answer is 4. || 4
The answer is: (B). The other option is wrong. || B
The correct option is B since option A is 5. || B
The answer is B because choice C is too large. || B
So it is _18_ eggs. || 18
So it is __18__ eggs. || 18
So it is *18* eggs. || 18
Final answer: *18* || 18
The area is 18 cm^{12} || 18
**18** || 18
'18' || 18
The answer is “18”. || 18
The answer is "x+1" || x+1
The answer is `18` || 18
Answer: "18" apples || 18
The answer is not enough information || not enough information
The answer is not $x+1$ but $x+2$. || x+2
It's 3 - 5 = -2 || -2
2*3*4 || 24
1,234,567 || 1234567
5 is not right. The answer is 7 || 7
She is not 18 years old; she is 17. || 17
The answer is correct: 18 || 18
The answer is "Paris". || Paris
The answer is 5'6" || 5'6"
Yes, because 2 is even || Yes
True, as shown || True
\boxed{3:00 \text{ PM}} || 3:00 p.m.
\boxed{3:00 \text{ AM}} || 3:00 a.m.
**Answer**: $\boxed{12}$ || 12
# Answer¶¶12 || 12
The answer is: ¶$$x = 3$$ || 3
Thus the answer is $\frac{3}{4}$, or 75%. || 3/4
Answer: 3/4 (i.e. 0.75) || 3/4
Therefore she has 12 apples left over. || 12
So the total cost is $45.00. || 45
He earns $1,200 per month. || 1200
So Tom is 12 years old, and his sister is 10. The answer is 12 || 12
The answer is thus 12. || 12
The answer is therefore 12. || 12
The answer is clearly 12. || 12
The answer is indeed 12. || 12
The answer must be 12. || 12
The answer is found to be 12. || 12
The answer is given by 12. || 12
The answer is given by $3+9=12$. || 12
The answer is $3+9=12$. || 12
The answer is 3 + 9 = 12 || 12
The answer is 3*4 = 12 apples. || 12
The answer is 12, as 3 times 4 is 12. || 12
The answer is 12; check: 3*4. || 12
The answer, 12, is correct. || 12
We get 12 as the answer. || 12
12 is the final answer. || 12
Final Answer: The final answer is $12$. I hope it is correct. || 12
Final Answer: The final answer is $\frac{1}{2}$. I hope it is correct. || \frac{1}{2}
The final answer is $[2,5)$. I hope it is correct. || [2,5)
**Final Answer**¶\[ \boxed{12} \] || 12
<answer> 12 </answer> || 12
<answer>\boxed{12}</answer> || 12
<answer>The answer is 12.</answer> || 12
#### 12. || 12
#### $12 || 12
####12 || 12
#### 12 apples || 12
The answer is 12!¶ || 12
Result = 12 || 12
x = 12 || 12
$x = 12$ || 12
\[ x = 12 \] || 12
\(\boxed{12}\) is the answer. || 12
The answer is twelve (12). || 12
The answer is 12 (twelve). || 12
Answer: 12 ✓ || 12
✅ **Answer: 12** || 12
Answer: **12 apples** || 12
Answer = 12 || 12
Answer - 12 || 12
Answer → 12 || 12
Answer is -12 || -12
The answer is $-\frac{1}{2}$ || -0.5
The answer is 1/2, i.e. 50%. || 1/2
The answer is 0.5 (50%). || 0.5
The answer is 12 + 3i || 12+3i
The answer is \(12\) apples. || 12
The answer is \$12. || 12
The answer is $12$ dollars. || 12
The answer is US$12. || 12
The answer is 12 USD. || 12
The answer is €12. || 12
The answer is 12%. || 12
The answer is 12 percent. || 12
The answer is 12 pct || 12%
The answer is 12 percentage || 12%
The answer is 1,234. || 1234
The answer is 1 234. || 1234
The answer is 12.0 || 12
The answer is 12.00 dollars || 12
"""
_WRONG = r"""
The answer is not 5. || 5
The answer is between 5 and 6 || 5
The answer is between 5 and 6 || 6
The answer is 5. Wait, no. The answer is 6. || 5
18 (not 5) || 5
\boxed{2} and \boxed{3} || 2
\boxed{2} and \boxed{3} || 2, 4
\boxed{\text{cat}} || \text{act}
\boxed{1, 234} || 1,234
\boxed{|x|<3} || -3\le x\le 3
\boxed{|x|<3} || -3<y<3
\boxed{x^2<4} || -2\le x<2
\boxed{x^2<4} || x<2
\boxed{\{x \mid x>2\}} || x\ge2
\boxed{x>1 or x<3} || (1,3)
The answer is no. || Yes
\boxed{1, 234} || 1,234 eggs
\boxed{1, 234} || $1,234
\boxed{2}, \boxed{3}, and \boxed{6} || 2,3,5
\boxed{2} and \boxed{3} || (2,3)
First \boxed{1}. So \boxed{2} and \boxed{3}. || 1,2,3
\boxed{2}, not \boxed{3} || 2, 3
\boxed{2}, but \boxed{3} || 2, 3
The answer isn't 5. || 5
The answer is not $5$. || 5
5 is not the answer. || 5
The answer is not 5 but 6. || 5
The answer is 6. The answer is not 5. || 5
It is not 5. || 5
It is 6, not 5. || 5
The answer is 6, not 5. || 5
So we get 6 instead of 5 || 5
The answer is between 5 and 6. || 6
The answer is between 5 and 6. || 5.5
The answer lies between 5 and 6. || 6
The answer is somewhere between $5$ and $6$. || 6
The answer is more than 5. || 5
The answer is less than 5 || 5
The answer is greater than $5$ || 5
The answer is anything but 5 || 5
The answer is either 5 or 6. || 5
The answer is either 5 or 6. || 6
The answer is 5 or 6. || 5
The answer is 5 or 6. || 6
The answer could be 5. || 6
The answer cannot be 5. || 5
The answer can't be 5. || 5
The answer should not be 5. || 5
The answer is 5. No wait, it is 6. || 5
\boxed{5}? No, the answer is 6. || 7
The answer is not $x+1$. || x+1
The answer is not x+1. || x+1
It is not $x+1$. || x+1
No, it is not. || Yes
\boxed{\left[\begin{array}{cc}1 & 2 \\3 & 5\end{array}\right]} || \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\boxed{3:00 \text{ PM}} || 3:00 a.m.
\boxed{11111111101} || 11,\! 111,\! 111,\! 100
Answer: 3/4 (i.e. 0.75) || 3/5
#### 12 apples || 13
Answer is -12 || 12
The answer is 12.01 dollars || 12
The answer is 120 || 12
The answer is 1.2 || 12
The answer is 5 less than 12. || 12
The answer is 12 or 13 || 12
The answer is 12 and 13 || 12
The answer is 12/13 || 12
The answer is 12^2 || 12
The answer is 12 x 2 || 12
The answer is 12:13 || 12
The answer is (12, 13) || 12
The answer is [12, 13] || 12
The answer is 12 to 13 || 12
The answer is 12-13 || 12
The answer is unclear: 12? || 13
I don't know. || 12
There is no answer. || 12
The answer is twelve thousand. || 12
The answer is 12 thousand. || 12
The answer is 12 million || 12
The answer is never 12. || 12
12 isn't the answer. || 12
12 was wrong. || 12
The answer wasn't 12. || 12
The answer is anything but $12$. || 12
I doubt that it is not 12. || 12
The answer is 5 (or 6) || 5
No, because 2 is odd || Yes
"""


def _wordings(text: str) -> list[tuple[str, str]]:
    return [
        (said.replace("¶", "\n"), reference)
        for said, _, reference in (line.partition(" || ") for line in text.strip().splitlines())
    ]


RIGHT, WRONG = _wordings(_RIGHT), _wordings(_WRONG)

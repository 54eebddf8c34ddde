"""Pairs of answers of the kinds that problems in mathematics have, and whether they are the same mathematics."""

from __future__ import annotations

NUMBERS_EQUAL = r"""
1,234.50 | 1234.5
12\,345 | 12345
12{,}345{,}678 | 12345678
0.50 | \frac{1}{2}
\frac{-3}{4} | -\frac{3}{4}
-3/4 | \frac{3}{-4}
2\frac{3}{4} | \frac{11}{4}
-1\frac{1}{2} | -1.5
0.\overline{36} | \frac{4}{11}
3.0\times 10^8 | 300000000
3\cdot10^{8} | 3e8
2^{100} | 1267650600228229401496703205376
5! | 120
½ | 0.5
−7 | -7
2.5 million | 2500000
2 dozen | 24
6:8 | 3/4
12th | 12
3 to 4 | 3:4
60\% | 0.6
25 percent | 25%
$18.00 | 18
18 dollars | $18
"""
NUMBERS_DIFFERENT = r"""
1,234 | 1.234
2 \frac{3}{4} | \frac{6}{4}
10\frac{1}{2} | 5
6.02 \times 10^{23} | 6.02\times10^{22}
\frac{22}{7} | \pi
3 thousand | 3
3.14 | 3.141
10^{20}+1 | 10^{20}
2^{53}+1 | 2^{53}
0.000001 | 0.000002
60% | 6
60% | 40%
18 euros | $18
$5 | 5%
1/0 | 0
twelve | 12
10:15 | 10:51
1 2 3 | 123
1,000 | 1,0
1,000 | 0,1
5 or more | 5
10 and above | 10
"""
UNITS_EQUAL = r"""
12 square meters | 12 m^2
12 cubic feet | 12\text{ ft}^3
60 mph | 60 miles per hour
9.8 m/s^2 | 9.8
30^\circ | 30 degrees
18 eggs | 18
18 (eggs) | 18
18 more dollars | 18
10 pounds | 10 lbs
2 ft 3 in | 27 inches
1 hour and 30 minutes | 1.5 hours
6\pi\text{ cm} | 6\pi
3\sqrt{2} meters | 3\sqrt{2}
5 square units | 5
8:30 am | 8:30
7 in the morning | 7
4 o'clock | 4
about 18 | 18
25 m north | 25 m
"""
UNITS_DIFFERENT = r"""
12\text{ cm}^2 | 12\text{ cm}^3
60 km/h | 60 mph
25^\circ C | 25^\circ F
18 eggs | 18 apples
3 hours | 3 minutes
6\pi cm | 6\pi m
2 ft 3 in | 2 ft 5 in
8 am | 8 pm
7 in the morning | 7 inches
4g^2 | 4
3m+5 | 3m-7
18 eggs and 3 chickens | 18
January 5 | January 6
25 m north | 25 m south
3 hours before | 3 hours after
1 kg m | 1 kg
2\text{ if } n \text{ is even} | 2\text{ if } n \text{ is odd}
"""
WORDS_EQUAL = r"""
\text{(B)} | B
(B) 12 | B
B. 12 | (B)
A, C | C, A
\text{True} | true
\text{no solution} | \emptyset
DNE | \text{does not exist}
red, blue | blue and red
January 5 | January 5
"""
WORDS_DIFFERENT = r"""
B | \text{(C)}
C | c
x | y
\text{east} | \text{west}
\text{ellipse} | \text{hyperbola}
triangle | 3
undefined | 0
(A) or (B) | (A)
(A) 5 or (B) 6 | (A)
A. and B | A
XIX | XXI
"""
PARTS_EQUAL = r"""
1,2,3 | 3,2,1
0 and -1 | \{-1,0\}
(0,\infty) | x>0
-1 \le x < 3 | [-1,3)
x<-1 or x>1 | (-\infty,-1)\cup(1,\infty)
x \neq 2 | (-\infty,2)\cup(2,\infty)
x \in \mathbb{R} | \text{all real numbers}
(1,2),(3,4) | (3,4),(1,2)
\left(3, \frac{\pi}{2}\right) | (3, \pi/2)
a=1,b=2 | b=2,a=1
(x,y)=(3,4) | (3,4)
x=-2\pm\sqrt{3} | -2+\sqrt{3},-2-\sqrt{3}
\pm1,\pm2 | -2,-1,1,2
a<b | b>a
2x<6 | x<3
p\land q | q\land p
"""
PARTS_DIFFERENT = r"""
(1,2,3) | (3,2,1)
1,2 | 1,2,3
\{1,2\} | (1,2)
[0,1] | (0,1)
[2,\infty) | x > 2
-1 \le x < 3 | (-1,3]
(1,2),(3,4) | (2,1),(3,4)
(0,3) | (0,1)\cup(2,3)
1<x<2 | 1<y<2
1,2 | 1<x<2
x=1,2 | 1<x<2
a=1,b=2 | a=2,b=1
x = 4 | y = 4
\pm 2 | 2
x>2 | 2
A\subset B | B\subset A
f\circ g | g\circ f
a \bmod b | b \bmod a
(1,000) | (1,0)
x<1 and x>3 | (-\infty,1)\cup(3,\infty)
x<1 and x>3 | x<1 or x>3
"""
FORMULAS_EQUAL = r"""
y=3x-2 | y = -2 + 3x
2x+y=3 | y=3-2x
3\times6=18 | 18
\frac{\sqrt{3}}{3} | \frac{1}{\sqrt{3}}
\sqrt[3]{16} | 2\sqrt[3]{2}
\frac{x^2-1}{x-1} | x+1
\sin(2x) | 2\sin x\cos x
e^{i\pi} | -1
(1+i)^2 | 2i
i^2 | -1
\log_2 8 | 3
\cos 60^\circ | \frac12
x^10 | x^{10}
x**2 | x^2
sqrt(2)/2 | \frac{\sqrt2}{2}
\frac{3}{2}x | 1.5x
x^{1/2} | \sqrt{x}
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix}1&2\\3&4\end{bmatrix}
1011_2 | 1011_{2}
\dbinom{5}{2} | 10
1/2x | \frac{x}{2}
f'(x)=2x | 2x
\begin{pmatrix} 0 \\ 1 \end{pmatrix} | \begin{pmatrix}0\\1\end{pmatrix}
\left(\begin{array}{c}1\\2\end{array}\right) | \begin{pmatrix}1\\2\end{pmatrix}
"""
FORMULAS_DIFFERENT = r"""
(a+b)^2 | a^2+b^2
x^2+y^2=4 | x^2+y^2=2
\sqrt{x+1} | \sqrt{x}+1
3+4i | 3-4i
a_1 | a_2
\sqrt{2}\times10^{-19} | \sqrt{3}\times10^{-19}
AB | ab
1011_2 | 1011_3
\frac{dy}{dx} | \frac{dx}{dy}
\overline{AB} | \overline{CD}
\lfloor x \rfloor | \lceil x \rceil
100\pi | 314.159
1.6\times10^{-19}x | 9.1\times10^{-31}x
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&5\end{pmatrix}
f'(x) | f(x)
1/2x | \frac{1}{2x}
CAB | ABC
"""


def _pairs(*lists: str) -> list[tuple[str, str]]:
    lines = [line for text in lists for line in text.strip().splitlines()]
    return [(answer.strip(), reference.strip()) for answer, _, reference in (line.partition(" | ") for line in lines)]


EQUAL = _pairs(NUMBERS_EQUAL, UNITS_EQUAL, WORDS_EQUAL, PARTS_EQUAL, FORMULAS_EQUAL)
DIFFERENT = _pairs(NUMBERS_DIFFERENT, UNITS_DIFFERENT, WORDS_DIFFERENT, PARTS_DIFFERENT, FORMULAS_DIFFERENT)

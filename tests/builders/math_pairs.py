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
5 degrees 3 radians | 8
5 degrees 3 radians | 8 degrees
5 degrees 3 radians | 4 degrees 4 radians
5 degrees 3 radians | 15
20 celsius 3 fahrenheit | 23
5 mph 3 kmh | 8 mph
5 am 3 pm | 8
5 euros 3 yen | 8
5 euros 3 yen | 4 euros 4 yen
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
DATA_SETS_EQUAL = r"""
2\pi i | 2i\pi
yi+x | x+iy
3\pi | $3\pi$
073 | 73
73 | 073
2^{n-1} | $2^{n-1}$
\frac{n(n+1)}{2} | \frac{n^2+n}{2}
f(x)=x | f(x)=x
f(x)=2x | 2x
f(n)=n+1 | $f(n) = n + 1$
y = 2x + 3 | 2x - y + 3 = 0
(x-1)^2+(y+2)^2=9 | x^2-2x+y^2+4y=4
\frac{x^2}{9}+\frac{y^2}{4}=1 | 4x^2+9y^2=36
\frac{\sqrt{2}}{2} | \frac{1}{\sqrt{2}}
2\sqrt{3}-1 | -1+2\sqrt3
\sqrt{12} | 2\sqrt{3}
3 + 2\sqrt{2} | (1+\sqrt{2})^2
\log_{10} 2 | \log_{10}2
\arctan \frac{1}{2} | \arctan\frac12
\tan^{-1} \frac{1}{2} | \arctan\frac12
-\infty < x < 2 | (-\infty, 2)
x \in (-\infty,-2] \cup [3,\infty) | (-\infty,-2]\cup[3,+\infty)
(0,+\infty) | (0,\infty)
k \geq 1 | [1,\infty)
n = 3, 5 | 3, 5
n=3 \text{ or } n=5 | 3, 5
x=1, y=2 | (1,2)
(x,y)=(1,2) | x=1, y=2
\{1,2,3\} | 1, 2, 3
1,2,\text{ and }3 | \{1,2,3\}
(1,2,3) | (1, 2, 3)
\text{Yes} | Yes
\text{yes} | \text{Yes}
\textbf{(C)}\ 12 | 12
\text{(C) }12 | \textbf{(C)}
4\frac{1}{2} | \frac{9}{2}
\$32{,}348 | \$32,\!348
32,348 \text{ dollars} | 32348
11\,111\,111\,100 | 11,\! 111,\! 111,\! 100
11111111100 | 11,\! 111,\! 111,\! 100
58,500 | 58,\!500
15\% | 15\%
15 | 15\%
0.15 | 15\%
120^\circ | 120
120\text{ degrees} | 120^\circ
5\text{ cm} | 5\mbox{ cm}
5 \text{ units} | 5
12\pi \text{ square inches} | 12\pi
1:2 | 1/2
1:2:3 | 1:2:3
2:3 | 2 : 3
3:00 \text{ PM} | 3:00 p.m.
\text{3:00} | 3:00
10_2 | 10_2
2A_{16} | 2A_{16}
10\overline{1} | 10\overline{1}
0.\overline{3} | \frac13
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix}
\begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix} | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\left[\begin{array}{cc}1 & 2 \\3 & 4\end{array}\right] | \begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}
\begin{pmatrix}\frac12 & 0\\0&2\end{pmatrix} | \begin{pmatrix}1/2 & 0\\0&2\end{pmatrix}
x^4 - 5x^3 + 2 | 2 - 5x^3 + x^4
(x+2)(x-3) | (x-3)(x+2)
x^2-x-6 | (x-3)(x+2)
\binom{10}{3} | 120
C(10,3) | C(10,3)
\frac{10!}{3!7!} | 120
2^{10}-1 | 1023
6.02\times10^{23} | 6.02 \cdot 10^{23}
1.5e10 | 15000000000
\text{Monday} | Monday
\text{infinitely many} | infinitely many
\text{None} | none
\emptyset | \varnothing
\text{There are no solutions} | no solution
\text{no such } n | no such n
e | e
e^2 | e^{2}
\frac{1}{1-x} | -\frac{1}{x-1}
a^2+b^2+c^2 | c^2+b^2+a^2
3x^2y | 3yx^2
\sqrt{a^2+b^2} | (a^2+b^2)^{1/2}
\cos\theta+i\sin\theta | \cos \theta + i \sin \theta
e^{i\theta} | e^{i \theta}
\frac{1+i\sqrt{3}}{2} | \frac{1}{2}+\frac{\sqrt{3}}{2}i
2 \pm i | 2+i, 2-i
-1 \pm \sqrt{2} | -1+\sqrt{2}, -1-\sqrt{2}
\pm\sqrt{3} | \sqrt3, -\sqrt3
2\pi(r+h) | 2\pi r+2\pi h
\pi(a^2-b^2) | \pi a^2-\pi b^2
\frac{4}{3}\pi r^3 | \frac{4\pi r^3}{3}
S_n = n^2 | n^2
a_n = 2n - 1 | 2n-1
\angle ABC = 60^\circ | 60^\circ
P = \frac{1}{3} | \frac13
\frac{AB}{CD}=2 | 2
\lfloor x \rfloor | \lfloor x \rfloor
\max = 5 | 5
5 \text{ and } 7 | 5, 7
\approx 3.14 | 3.14
n \ge 2 | n\geq 2
p=2,q=3 | (p,q)=(2,3)
x=2k\pi, k\in\mathbb{Z} | x = 2k\pi, k \in \mathbb{Z}
2k\pi (k \in \mathbb{Z}) | 2k\pi (k\in\mathbb{Z})
\frac{3}{7}, \frac{4}{7} | \frac37,\frac47
(\frac{1}{2}, -\frac{3}{2}) | (0.5, -1.5)
\text{Alice} | Alice
x = 7 | x=7
10\sqrt{2} \text{ miles} | 10\sqrt2
12{:}30 | 12:30
\text{cat} | \text{cat}
cat | \text{cat}
\text{cat} | cat
Cat | \text{cat}
\text{dog}, \text{cat} | \text{cat}, \text{dog}
5 \text{ min} | 5 \text{ min}
\text{odd} | odd
abc | bca
\text{red} | \textbf{red}
\text{6 am} | 6 am
(\text{x}, \text{y}) | (x,y)
\text{6 or 7} | 6, 7
\text{cat} | \text{ cat }
1,234 | 1,234
1,234 eggs | 1,234
1, 234, 5 | 1,234,5
100, 200 | 100, 200
\text{dog} and \text{cat} | \text{cat}, \text{dog}
"""
DATA_SETS_DIFFERENT = r"""
73 | 730
\frac{n(n+1)}{2} | \frac{n(n-1)}{2}
y = 2x + 3 | 2x - y - 3 = 0
\frac{x^2}{9}+\frac{y^2}{4}=1 | 4x^2+9y^2=35
x=1, y=2 | (2,1)
(1,2,3) | \{1,2,3\}
\text{yes} | \text{No}
\textbf{(C)}\ 12 | \textbf{(D)}\ 12
\textbf{(C)}\ 12 | 13
0.15 | 15
1.5\% | 15\%
12\pi \text{ square inches} | 12\pi \text{ square feet}
1:2:3 | 1:3:2
3:00 \text{ PM} | 3:00 a.m.
3:00 | 3:30
204_5 | 204_6
\begin{pmatrix} 1 \\ 2 \end{pmatrix} | \begin{pmatrix}2\\1\end{pmatrix}
x^2+x-6 | (x-3)(x+2)
2^{10} | 1023
\text{Monday} | Sunday
e^2 | 2e
a^2+b^2 | a^2-b^2
\frac{1+i\sqrt{3}}{2} | \frac{1}{2}-\frac{\sqrt{3}}{2}i
\pm\sqrt{3} | \sqrt3
a_n = 2n - 1 | 2n+1
3.14 | \pi
n \ge 2 | n>2
\text{cat} | \text{act}
cat | \text{act}
\text{cat} | act
\text{cat}, \text{dog} | \text{act}, \text{dog}
\text{cat} \text{ and } \text{dog} | \text{act} \text{ and } \text{dog}
5 \text{ min} | 5 \text{ sec}
\mathrm{red} | \text{blue}
\text{sin} | \text{nis}
1, 234 | 1,234.5
\text{cat} and \text{dog} | \text{act} and \text{dog}
2N+1 | 2n+1
a+B | A+b
"""
SETS_EQUAL = r"""
|x|<3 | -3<x<3
|x|>3 | x<-3 or x>3
|x|>3 | (-\infty,-3)\cup(3,\infty)
|x-2|\le 3 | [-1,5]
|2x+1|<5 | -3<x<2
x^2<4 | -2<x<2
x^2>4 | x<-2 or x>2
x^2<2 | -\sqrt{2}<x<\sqrt{2}
x^2-5x+6<0 | 2<x<3
x^2-5x+6\le0 | [2,3]
x^2-x-1<0 | \left(\frac{1-\sqrt{5}}{2},\frac{1+\sqrt5}{2}\right)
\{x \mid x>2\} | x>2
\{x : x>2\} | (2,\infty)
\{x \in \mathbb{R} \mid x \ge 2\} | [2,\infty)
\{x \mid x<-1 \text{ or } x>1\} | (-\infty,-1)\cup(1,\infty)
x>1 and x<3 | (1,3)
x>1 \text{ and } x<3 | 1<x<3
x<3 and x>1 | (1,3)
x\ge1 and x<3 | [1,3)
x>1 \land x<3 | (1,3)
1<2x-1<5 | 1<x<3
2x<6 | (-\infty,3)
-2x<6 | x>-3
x+y<3 | y+x<3
(0,2)\cup(1,3) | (0,3)
(0,1]\cup(1,3) | (0,3)
(0,1)\cup\{1\}\cup(1,3) | (0,3)
x<1, x>3 | (-\infty,1)\cup(3,\infty)
x \ne 1 and x \ne 2 | (-\infty,1)\cup(1,2)\cup(2,\infty)
x \ne 1, 2 | x \ne 1, 2
\{x \mid x^2=4\} | \{x \mid x^2=4\}
"""
SETS_DIFFERENT = r"""
|x|<3 | -3\le x\le 3
|x|\le3 | -3< x< 3
|x|<3 | x<3
|x|<3 | |x|<4
|x|<3 | |x|\le3
|x|<3 | -3<y<3
|x|<3 | x<-3 or x>3
|x|>3 | x<-3 and x>3
|x|>3 | (-3,3)
|x-2|\le 3 | (-1,5)
|x-2|\le 3 | -1,5
x^2<4 | x<2
x^2<4 | -2<x\le2
x^2>4 | -2<x<2
x^2>4 | x>2
x^2<2 | -2<x<2
x^2-5x+6\ge0 | [2,3]
x^2-x-1<0 | \left(\frac{1-\sqrt{3}}{2},\frac{1+\sqrt3}{2}\right)
\{x \in \mathbb{Z} \mid x \ge 2\} | [2,\infty)
\{x \mid x>2\} | [2,\infty)
\{x \mid x>2\} | \{2\}
\{x \mid x>2\} | x<2
\{x \mid y>2\} | x>2
\{x \mid x<-1 \text{ and } x>1\} | (-\infty,-1)\cup(1,\infty)
x>1 or x<3 | (1,3)
x>1 and x<3 | [1,3]
x>1 and y<3 | (1,3)
x>1 and x<3 | x>1 or x<3
x>1 and x>3 | (1,3)
1<2x-1<5 | 1<x<4
-2x<6 | x<-3
|z|<3 | -3<z<3
x+y<3 | x<3
x^2+y^2<3 | x^2<3
x^3<8 | x^2<4
ab<3 | a<3
(0,1)\cup(1,3) | (0,3)
x<1, x>3 | x<9, x>0
x \ne 1 and x \ne 2 | x\ne 1
x \ne 1 or x \ne 2 | (-\infty,1)\cup(1,2)\cup(2,\infty)
x \ne 1, 2 | x = 1, 2
"""


def _pairs(*lists: str) -> list[tuple[str, str]]:
    lines = [line for text in lists for line in text.strip().splitlines()]
    return [(answer.strip(), reference.strip()) for answer, _, reference in (line.partition(" | ") for line in lines)]


EQUAL = _pairs(NUMBERS_EQUAL, UNITS_EQUAL, WORDS_EQUAL, PARTS_EQUAL, FORMULAS_EQUAL, DATA_SETS_EQUAL, SETS_EQUAL)
DIFFERENT = _pairs(
    *(NUMBERS_DIFFERENT, UNITS_DIFFERENT, WORDS_DIFFERENT, PARTS_DIFFERENT, FORMULAS_DIFFERENT),
    *(DATA_SETS_DIFFERENT, SETS_DIFFERENT),
)

"""Answers of unusual forms, right and wrong, whose truth was decided by hand: over 250 of MATH, over 150 of GSM8K."""

from rloom.rewards.rules import gsm8k
from rloom.rewards.rules.math import same_answer

# truth <- answer
RIGHT = r"""
2^{100} <- 4^{50} ¦ 50! <- 30414093201713378043612608166064768844377641568960512000000000000
\emptyset <- \{\} ¦ \emptyset <- \varnothing ¦ \emptyset <- \{ \} ¦ \emptyset <- ∅
\emptyset <- \text{empty set} ¦ \emptyset <- \left\{\right\} ¦ \varnothing <- \emptyset
\mathbb{R} <- (-\infty,\infty) ¦ (-\infty,\infty) <- \mathbb{R} ¦ (-\infty,\infty) <- \mathbb R
(-\infty,\infty) <- x \in \mathbb{R} ¦ (-\infty,\infty) <- (-\infty, +\infty)
(-\infty,\infty) <- -\infty < x < \infty ¦ (-\infty,\infty) <- \text{all real numbers} ¦ \infty <- infinity
\infty <- \text{infinity} ¦ \infty <- +\infty ¦ \infty <- ∞ ¦ -\infty <- \text{negative infinity}
-\infty <- -\text{infinity} ¦ 12 <- \approx 12 ¦ 12 <- x \approx 12 ¦ 12 <- ≈12
\frac23 <- \frac23 \approx 0.67 ¦ \$\dfrac23 \approx \$0.67 <- \frac{2}{3}
\$\dfrac23 \approx \$0.67 <- 0.67 ¦ \approx 8.24 \text{ mph} <- 8.24 ¦ \{1,2\} <- \{1,2,2\}
\{1,2\} <- \{2,1,1,2\} ¦ \{0.5,2\} <- \{\frac12,2,\frac{1}{2}\}
(-\infty,3)\cup(5,\infty) <- x<3 \text{ or } x>5 ¦ (-\infty,3)\cup(5,\infty) <- x<3 or x>5
(-\infty,3)\cup(5,\infty) <- x > 5 \text{ or } x < 3
(-\infty,3]\cup[5,\infty) <- x\le 3 \text{ or } x \geq 5 ¦ (-\infty,3)\cup(5,\infty) <- x<3 \lor x>5
(-\infty,3)\cup(5,\infty) <- (5,\infty)\cup(-\infty,3) ¦ x<3 \text{ or } x>5 <- (-\infty,3)\cup(5,\infty)
(-\infty, -2)\cup(-2,\infty) <- x \neq -2 ¦ (3,5) <- x>3 \text{ and } x<5 ¦ [-2,7] <- -2 \le x \le 7
(-\infty,3)\cup(3,\infty) <- \mathbb{R}\setminus\{3\} ¦ B <- \textbf{(B) } 12 ¦ B <- \textbf{(B)}\ 12
B <- (B) 12 ¦ B <- \text{B. 12} ¦ B <- \text{(B) east} ¦ B <- B) 12 ¦ \text{(B)} <- \textbf{(B) } 12
\text{B} <- B ¦ (B) <- B ¦ \textbf{(B) } 12 <- B ¦ 6.02e23 <- 6.02\times10^{23}
6.02\times10^{23} <- 6.02e23 ¦ 6.02\times10^{23} <- 6.02 \cdot 10^{23} ¦ 300 <- 3e2
0.0012 <- 1.2\times 10^{-3} ¦ 0.0012 <- 1.2e-3 ¦ 10\text{ a.m.} <- 10 a.m. ¦ 10\text{ a.m.} <- 10\text{ AM}
10\text{ a.m.} <- 10 ¦ 8\!:\!34 \text{ p.m.} <- 8:34 \text{ PM} ¦ 8\!:\!34 \text{ p.m.} <- 8:34 p.m.
8\!:\!34 \text{ p.m.} <- 8:34 ¦ \text{no solution} <- \text{No solutions}
\text{no solution} <- No solution ¦ \text{no solutions} <- no solution
\text{two lines} <- \text{two lines} ¦ \text{ellipse} <- \text{Ellipses} ¦ \text{parabola} <- parabolas
5000000 <- 5\text{ million} ¦ 5000000 <- 5 million ¦ 2500000 <- 2.5\text{ million}
5,000,000 <- 5\text{ million dollars} ¦ 60 <- 5\text{ dozen} ¦ 50000 <- 5万
5\text{ million} <- 5\text{ million} ¦ 12 <- 12\text{ feet squared} ¦ 12 <- 12\text{ sq. ft.}
34\text{ sq. units} <- 34 sq. units ¦ 12 <- 12\text{ m/s}^2 ¦ 12 <- 12\text{ m/s^2} ¦ 10000 <- 10\,000
10000 <- 10 000 ¦ 1234 <- 1\,234 ¦ 1,234 <- 1234 ¦ 1,234 <- 1 234 ¦ 240\text{ ways.} <- 240 ways
7 \text{ distinct integers} <- 7 ¦ 16\text{ daps} <- 16 ¦ 1.85\ \text{USD} <- 1.85
12\sqrt{13}\text{ feet} <- 12\sqrt{13} ¦ 3+5i <- 3+5\mathrm{i} ¦ 2e <- 2\mathrm{e} ¦ 5 <- x=5
\text{A,B} <- \text{A and B} ¦ -12 \text{ or } -30 <- -30, -12 ¦ 50 <- 50\% ¦ 6, 8\text{, and }10 <- 6,8,10
5 <- 5\text{ apples} ¦ 5 <- 5 apples ¦ 90 <- 90^\circ ¦ \text{Friday} <- friday ¦ 5 <- \boxed{5}
x+2 <- 2+x ¦ \frac{\pi}{2} <- π/2 ¦ [0,1)\cup(1,2] <- [0,1) ∪ (1,2] ¦ 3\times4 <- 12 ¦ \pm 2 <- 2, -2
5\text{ cm} <- 5\,\mathrm{cm} ¦ 1 <- 1\text{ m} ¦ \text{(E)}, <- E ¦ \text{October 30} <- October 30
"""
WRONG = r"""
2^{100}-2 <- 2^{100} ¦ 2^{2008}-2 <- 2^{2008} ¦ 2^{4181} <- 2^{4181}+1 ¦ 50! <- 50!+1
10^{100}-1 <- 10^{100} ¦ \frac{2^{100}-1}{2} <- 2^{99} ¦ 2^{1007} <- 2^{1007}+2^{900}
5 <- 5\text{ million} ¦ 5 <- 5\text{ dozen} ¦ 5 <- 5\text{ squared} ¦ 5 <- 5\text{ or more}
5 <- 5\text{ or 6} ¦ 5 <- 5 or 6 ¦ 5 <- 5 million ¦ 5 <- 5 thousand ¦ 5 <- 5\text{ hundred}
5 <- 5\text{ billion dollars} ¦ 5 <- 5\text{ half} ¦ 5 <- 5\text{ and a half} ¦ 5 <- 5\text{ thirds}
5 <- 5\text{ tenths} ¦ 5 <- 5\text{ hundredths} ¦ 5 <- 5\text{ cubed} ¦ 5 <- 5\text{ factorial}
5 <- 5\text{ plus one} ¦ 5 <- 5\text{ minus one} ¦ 5 <- 5\text{ at least} ¦ 5 <- 5\text{ or fewer}
5 <- 5\text{ to }7 ¦ 5 <- 5\text{ to 7} ¦ 5 <- 5\text{ to seven} ¦ 5 <- 5\text{ and up} ¦ 5 <- 5万 ¦ 5 <- 5亿
5 <- 5百万 ¦ 5 <- 5\text{万} ¦ 5 <- 5\text{x} ¦ 5 <- 5\text{i} ¦ 5 <- 5\mathrm{i} ¦ 5 <- 5\mathrm{e}
5 <- 5\text{ below zero} ¦ 5 <- 5\text{ less than }x ¦ 5 <- 5\text{ squared plus six}
5 <- 5\text{ repeating} ¦ 5 <- 5k ¦ 5 <- 5\text{k} ¦ 12 <- 1 2 ¦ 12 <- 1\,2 ¦ 12 <- 1~2 ¦ 12 <- 1\ 2
1,234 <- (1,234) ¦ 1234 <- (1,234) ¦ (1,234) <- 1234 ¦ 1,234 <- [1,234] ¦ 1,234 <- \{1,234\} ¦ 5 <- 6=5
5 <- 5_6 ¦ 5 <- \le 5 ¦ 5 <- 5 h 30 min ¦ 1011_2 <- 1011_3 ¦ 0.1 <- 0.10000001 ¦ 5 <- \approx 6
5 <- 6 \approx 5 ¦ 5 <- x \approx 6 ¦ 5 <- \neq 5 ¦ \emptyset <- \{0\} ¦ \emptyset <- 0
\emptyset <- \{\emptyset\} ¦ \emptyset <- \mathbb{R} ¦ \mathbb{R} <- \mathbb{Q} ¦ \mathbb{R} <- R
\mathbb{R} <- (0,\infty) ¦ \mathbb{R} <- \mathbb{R}^2 ¦ \mathbb{R} <- (-\infty,\infty] ¦ \infty <- -\infty
\infty <- 8 ¦ \infty <- \text{infinitely many} ¦ \infty <- -infinity ¦ -\infty <- infinity
\{1,2\} <- \{1,2,3\} ¦ 1,2,2 <- 1,2 ¦ 1,2 <- 1,2,2 ¦ (1,2) <- (1,2,2) ¦ (1,2,2) <- (1,2)
(-\infty,3)\cup(5,\infty) <- x<3 \text{ and } x>5 ¦ (-\infty,3)\cup(5,\infty) <- x<3 \text{ or } x>4
(-\infty,3)\cup(5,\infty) <- x\le3 \text{ or } x>5 ¦ (-\infty,3)\cup(5,\infty) <- x<3 \text{ or } y>5
(-\infty,3)\cup(5,\infty) <- x<3 ¦ (-\infty,3)\cup(5,\infty) <- x<3, x>5, x=4 ¦ (3,5) <- x>3 \text{ or } x<5
(-2,2) <- x^2<4 ¦ (-\infty,-2)\cup(2,\infty) <- x^2>4 ¦ x<3 <- y<3 ¦ x<3 <- x<3 \text{ or } x>5
B <- \textbf{(C) } 12 ¦ B <- (B) or (C) ¦ B <- (A) (B) ¦ B <- \text{(B) or (C)} ¦ B <- A, B
B <- \text{B, C} ¦ B <- (C) B ¦ B <- AB ¦ B <- \text{BC} ¦ B <- B+C ¦ 12 <- \text{(A) } 13
A <- \text{A. 12 or B. 13} ¦ D <- \text{Don't know} ¦ A <- \text{All of them} ¦ \text{A} <- \text{A, B}
6.02e23 <- 6.02e22 ¦ 6.02e23 <- 6.02\times10^{22} ¦ 6.02\times10^{23} <- 6.02 ¦ 23 <- 6.02e23
10\text{ a.m.} <- 10\text{ p.m.} ¦ 10\text{ a.m.} <- 10 p.m. ¦ 10\text{ a.m.} <- 11 a.m.
8\!:\!34 \text{ p.m.} <- 8:34 a.m. ¦ \text{no solution} <- \text{one solution}
\text{no solution} <- \text{solution} ¦ \text{even} <- \text{odd} ¦ \text{yes} <- \text{no}
\text{two lines} <- \text{two planes} ¦ \text{mass} <- \text{mas} ¦ 5050 <- \sum_{k=1}^{100} k
\frac12 <- \int_0^1 x dx ¦ 1 <- \lim_{x\to 0} \frac{\sin x}{x} ¦ 120 <- \prod_{k=1}^5 k
5 <- 5\text{ is wrong} ¦ 5 <- \text{not }5 ¦ 5 <- 5\text{, or }6 ¦ 5 <- 5,6 ¦ 5 <- \{5\}\cup\{6\}
5 <- 5\pm 1 ¦ 5 <- 5 \text{ apples and 6 pears} ¦ 5 <- 5/1/1/2 ¦ 5 <- 5\cdot 10^{6} ¦ 5 <- 5 \times 10^2
5 <- 5e1 ¦ 0.3 <- 0.3\text{ repeating} ¦ 3 <- \sqrt{3} ¦ 3 <- 3! ¦ 3 <- 3^{\text{rd}}x ¦ 7 <- 7 \pmod{8}
100 <- 1\text{ hundred and one} ¦ x <- x\text{ or }y ¦ 2\pi <- 2 ¦ 2\pi <- 2\text{pi}r
-5 <- 5\text{ below zero} ¦ 5 <- 5\text{ under par} ¦ (1,2) <- \{1,2\} ¦ (1,2) <- [1,2]
\text{A,B} <- \text{A} ¦ 5 <- 5 <- 6 ¦ 5 <- 5\text{ } 6 ¦ 5 <- 5\quad 6 ¦ 56 <- 5\quad 6 ¦ 56 <- 5\text{ }6
5 <- five ¦ 5 <- 5\text{ dozens} ¦ 1 <- 1\text{ googol} ¦ 5 <- 5\text{ zillion} ¦ 5 <- 5\text{ score}
"""
# After `####`, for the ground truth 18.
EIGHTEEN = r"""
18 ¦ +18 ¦ 1.8e1 ¦ 1.8E1 ¦ 18. ¦ 18 . ¦ $18 ¦ 18$ ¦ $18.00 ¦ 18% ¦ 18\% ¦ **18** ¦ 18 dollars ¦ 18 dollars.
18-inch ¦ 18/hour ¦ 18 #### ¦ \boxed{18} ¦ $\boxed{\$18}$ ¦ \(18\) ¦ 18 square feet ¦ 18, as asked
18. That is for 3 days ¦ 18 (dollars) ¦ 18</answer> ¦ 18<|im_end|> ¦ 18\text{ cm}^2 ¦ 18^\circ ¦ 18° ¦ 18元
18 个苹果。 ¦ 18! ¦ 18 m ¦ 18 m/s ¦ 18 times ¦ 18 ten-dollar bills ¦ `18` ¦ 18 \text{ dollars}
18 — that is all ¦ 1.8 × 10^1 ¦ 1.8\times 10^{1} ¦ 1.8×10¹ ¦ 18 feet squared ¦ 18 a.m. ¦ 18 千克 ¦ 18平方米
18 apples in total, for each ¦ 18 cents each ¦ 18 seconds ¦ 18 months ¦ 0.018 thousand ¦ 18€ ¦ 18 km/h
18 mph ¦ 18 sq. ft. ¦ 18 people; ¦ 18 (that is it) ¦ 18 students and teachers ¦ 18 of them ¦ 18 more apples
18 more
"""
NOT_EIGHTEEN = r"""
18,5 ¦ 18^2 ¦ 18*2 ¦ 18-19 ¦ 18 + 2 = 20 ¦ 18 19 ¦ 18 - 19 ¦ 18 – 19 ¦ 18–19 ¦ 18~19 ¦ 18±2 ¦ 18×2 ¦ 18 x 2
18x2 ¦ 18x ¦ 18/2/3 ¦ 18:30 ¦ 18 or 19 ¦ 18 to 20 ¦ 18 and 19 ¦ 18 and a half ¦ 18, 19 ¦ 18, or 19 ¦ 18. 5
18.5.2 ¦ 18\times 2 ¦ 18\cdot2 ¦ 18\pi ¦ 18π ¦ 18² ¦ 18½ ¦ 18_2 ¦ 18 = 18 ¦ 18 < 19 ¦ 18 or more
18 million ¦ 18 thousandths ¦ 18 tenths ¦ 5万 ¦ 18k ¦ 18K ¦ 18!2 ¦ 18 (19) ¦ 18(19) ¦ 18 squared ¦ 18 cubed
18 plus two ¦ 18 minus one ¦ 18 hundred ¦ 18 dozen ¦ 18 over 2 ¦ 18 over two ¦ 18\text{ or }19
18\text{ million} ¦ 18e5 ¦ 18i ¦ 18 n ¦ 18**2 ¦ 18 ** 2 ¦ 18 *2* ¦ 18或19 ¦ 18到20 ¦ 18以上 ¦ 18多
18 apples or 19 apples ¦ 18 apples. Or 19. ¦ 18 & 19 ¦ 18|19 ¦ 18 / x ¦ 18 dollars and fifty cents
18 less than 20 ¦ 18 below zero ¦ 18 degrees below zero ¦ 18 百万 ¦ 18 at least ¦ 18 at most ¦ 18.. 19 ¦ 18;19
18\%+2 ¦ 18%2 ¦ 18 repeating ¦ 18 is wrong ¦ 18\frac12 ¦ 18{2} ¦ 18 \pm 2 ¦ 18^{\circ}2 ¦ **18** **19**
$18$ $19$ ¦ 18 not ¦ 18->19 ¦ 18→19 ¦ 18=>19 ¦ 18 vs 19 ¦ 18 dollars 50 cents ¦ 18#19 ¦ 18 half ¦ 18 three
twelve ¦ 18平方
"""


def entries(table: str) -> list[str]:
    return [entry for line in table.strip().splitlines() for entry in line.split(" ¦ ")]


def pairs(table: str) -> list[tuple[str, str]]:
    """(answer, truth)."""
    return [(answer, truth) for truth, _, answer in (entry.partition(" <- ") for entry in entries(table))]


def test_answers_that_mean_the_ground_truth_are_right() -> None:
    assert [pair for pair in pairs(RIGHT) if not same_answer(*pair)] == []


def test_answers_that_only_look_like_the_ground_truth_are_wrong() -> None:
    assert [pair for pair in pairs(WRONG) if same_answer(*pair)] == []


def test_a_number_after_the_hashes_may_have_a_unit_and_markup() -> None:
    scores = {text: gsm8k.compute_score("s", f"#### {text}", "18")["score"] for text in entries(EIGHTEEN)}
    assert [text for text, score in scores.items() if score != 1.0] == []


def test_a_number_that_goes_on_is_not_the_answer() -> None:
    scores = {text: gsm8k.compute_score("s", f"#### {text}", "18")["score"] for text in entries(NOT_EIGHTEEN)}
    assert [text for text, score in scores.items() if score != 0.0] == []


def test_the_tables_are_complete() -> None:
    assert [len(entries(table)) for table in (RIGHT, WRONG, EIGHTEEN, NOT_EIGHTEEN)] == [114, 163, 61, 99]

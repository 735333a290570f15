"""Divisors, for error messages with the nearest values that work."""


def nearest_divisors(whole: int, wanted: int) -> str:
    """ "64 or 128": the divisors of `whole` on either side of `wanted`."""
    every = divisors(whole)
    below = [d for d in every if d < wanted][-1:]
    above = [d for d in every if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)


def divisors(whole: int) -> list[int]:
    return [d for d in range(1, whole + 1) if whole % d == 0]

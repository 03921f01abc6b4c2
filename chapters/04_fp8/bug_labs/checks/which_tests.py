"""The verdict of a bug lab on numbers: which of some tests see the fault."""

from collections.abc import Callable, Mapping

from fa3_course.checker import Exercise, Refused, Trial, protocol


def sees(test: Callable, functions: list, seed: int) -> bool:
    """Whether a test refuses the functions."""
    try:
        test(Trial(seed), *functions)
    except Refused:
        return True
    return False


def expect_prediction(t: Trial, exercise: Exercise, predicted: Callable, tests: Mapping[str, Callable]) -> None:
    """Compares `predicted()`, a set of names, with the tests that refuse the functions as handed out.

    Args:
        tests: by name; each takes a Trial and the exercise's functions but the first, which is `predicted`.
    """
    said = predicted()
    known = "there are: " + ", ".join(map(repr, tests))
    t.expect(isinstance(said, set | frozenset), f"verdict gave {said!r}, expected a set of names; {known}")
    t.expect(said <= set(tests), f"{said - set(tests)} are no tests; {known}")
    functions = protocol.handed_out(exercise)[1:]
    seeds = t.rng.integers(10**6, size=3)
    seen = {name for name, test in tests.items() if any(sees(test, functions, int(seed)) for seed in seeds)}
    blind, alert = sorted(said - seen), sorted(seen - said)
    text = "".join(
        f"{names} {'passes' if blind_one else 'fails'}, you say it {'fails' if blind_one else 'passes'}. "
        for names, blind_one in [(repr(n), True) for n in blind] + [(repr(n), False) for n in alert]
    )
    t.expect(not text, text.strip())


def all_hold(t: Trial, tests: Mapping[str, Callable], *functions: Callable) -> None:
    """Refuses what one of the tests refuses."""
    for test in tests.values():
        test(t, *functions)

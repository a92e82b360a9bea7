"""The error family: exit codes, messages, and the way through a pickle."""

import pickle

import pytest

from wattune import errors
from wattune.errors import SpaceError, WattuneError, closest


def family(cls=WattuneError):
    return [
        cls,
        *(found for child in cls.__subclasses__() if child.__module__ == errors.__name__ for found in family(child)),
    ]


@pytest.mark.parametrize("cls", family())
def test_an_error_survives_pickling_with_message_and_kind(cls):
    error = pickle.loads(pickle.dumps(cls("tp=3 does not divide 4; use tp in {1, 2, 4}")))
    assert type(error) is cls and str(error) == "tp=3 does not divide 4; use tp in {1, 2, 4}"
    assert error.exit_code in (1, 2, 3)


def test_the_family_has_one_head():
    children = {cls.__name__ for cls in WattuneError.__subclasses__()}
    assert {"SpaceError", "PlanError", "EngineError", "TelemetryError", "TrackingError"} <= children
    assert SpaceError.exit_code == 2


def test_problems_of_a_file_are_one_error():
    one = SpaceError.from_problems("x.yaml", ["a: wrong"])
    assert str(one) == "x.yaml: a: wrong" and pickle.loads(pickle.dumps(one)).problems == ["a: wrong"]
    two = SpaceError.from_problems("x.yaml", iter(["a: wrong", "b: wrong"]))
    assert str(two).splitlines() == ["x.yaml: 2 problems", "  a: wrong", "  b: wrong"]
    many = str(SpaceError.from_problems("x.yaml", (f"a[{n}]: wrong" for n in range(5000)))).splitlines()
    assert many[0] == "x.yaml: 5,000 problems" and many[100:] == ["  a[99]: wrong", "  and 4,900 more"]


def test_an_unknown_name_gets_the_closest_one_or_all():
    assert closest("zero_1", ["none", "zero1"]) == 'did you mean "zero1"?'
    assert closest("hyperband", ["random", "grid"]) == "use one of: grid, random"

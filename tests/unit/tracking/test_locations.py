"""Places of artifacts: without a machine's path."""

import pytest

from wattune.tracking.locations import location, path_inside


@pytest.mark.parametrize(
    ("uri", "inside"),
    [
        ("mlflow-artifacts:/study/a1/artifacts", "study/a1/artifacts"),
        ("mlflow-artifacts:/a%20b/a1/artifacts", "a b/a1/artifacts"),
        ("mlflow-artifacts://other.host/study", None),
        ("mlflow-artifacts:/study/../../etc", None),
        ("mlflow-artifacts:/", None),
        ("file:///data/mlartifacts/study", None),
        ("s3://bucket/mlartifacts/study", None),
        ("", None),
    ],
)
def test_a_path_is_inside_the_folder_or_it_is_none_of_ours(uri: str, inside: str | None) -> None:
    assert path_inside(uri) == inside


def test_a_location_names_no_machine() -> None:
    assert location("moe") == "mlflow-artifacts:/moe" and path_inside(location("moe")) == "moe"

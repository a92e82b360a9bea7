"""Secrets and control characters do not get into what is shown or kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.masking import masked_arguments, printable, without_secrets


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://user:pw@host:5000/x", "http://user:***@host:5000/x"),
        (
            "cannot reach postgresql://me:p%40ss@db/mlflow: refused",
            "cannot reach postgresql://me:***@db/mlflow: refused",
        ),
        ("s3://key:secret@bucket/studies", "s3://key:***@bucket/studies"),
        ("https://host/a?token=abc&page=2", "https://host/a?token=***&page=2"),
        ("https://a/b?X-Amz-Signature=0f0f&sig=1", "https://a/b?X-Amz-Signature=***&sig=***"),
        ("sqlite:////data/mlflow.db", "sqlite:////data/mlflow.db"),
        ("postgresql://me:p/a/ss@db/mlflow", "postgresql://me:***@db/mlflow"),
        ("http://host:5000", "http://host:5000"),
        ("http://host:5000/of/me@here", "http://host:5000/of/me@here"),
        ("http://host/a:b@c", "http://host/a:b@c"),
        ("mail me@host: at 12:30", "mail me@host: at 12:30"),
        ("got hf_abcdefghijklmnopqrst", "got ***"),
    ],
)
def test_urls_show_no_secret(text: str, shown: str) -> None:
    assert without_secrets(text) == shown
    assert without_secrets(shown) == shown


def test_arguments_are_masked_by_their_names() -> None:
    command = [
        "env",
        "HF_TOKEN=abc",
        "train.py",
        "--hf-token",
        "abc",
        "--api_key=x y",
        "--wandb-key",
        "k",
        "--lr",
        "3e-4",
    ]
    shown = [
        "env",
        "HF_TOKEN=***",
        "train.py",
        "--hf-token",
        "***",
        "--api_key=***",
        "--wandb-key",
        "***",
        "--lr",
        "3e-4",
    ]
    assert masked_arguments(command) == shown


def test_tokens_of_text_are_no_secret() -> None:
    command = [
        "train.py",
        "--max-tokens",
        "4096",
        "--tokenizer",
        "llama",
        "--num_tokens=7",
        "--tokens-per-sample",
        "512",
    ]
    assert masked_arguments(command) == command


def test_an_option_without_a_value_masks_no_other_option() -> None:
    assert masked_arguments(["x", "--use-auth-token", "--model", "m"]) == ["x", "--use-auth-token", "--model", "m"]


def test_a_terminal_is_given_nothing_to_obey() -> None:
    assert printable("a\x1b[2Jb\rc\x9bd\x07\n\te") == "a\\x1b[2Jb\\x0dc\\x9bd\\x07\n\te"
    assert printable("Zürich 25 °C ±2") == "Zürich 25 °C ±2"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert all(each in "\n\t" or (ord(each) >= 32 and not 127 <= ord(each) < 160) for each in printable(text))

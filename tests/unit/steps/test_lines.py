"""Labels of launchers, numbers as programs round them, and rates of tokens."""

import pytest

from wattune.steps.lines import label_of, number_in, token_rate_in, total_tokens_in


@pytest.mark.parametrize(
    ("line", "numbers"),
    [
        ("[rank3]:step 1", (3,)),
        ("[rank: 0] step 1", (0,)),
        ("[default0]:step 1", (0,)),
        ("[trainer1]:step 1", (1,)),
        (" 12: step 1", (12,)),
        ("[2] step 1", (2,)),
        ("[1,0]<stdout>:step 1", (0,)),
        ("[1,5]<stderr>: step 1", (5,)),
        ("[prterun-host-12@1,7]<stdout>: step 1", (7,)),
        ("(RayTrainWorker pid=123, ip=10.0.0.1) step 1", (123,)),
        ("(pid=123) step 1", (123,)),
        ("trainer-1  | [rank0]: step 1", (1, 0)),
        ("[pod/train-0/main] step 1", (0,)),
        ("worker-1: step 1", (1,)),
        ("2026-01-02T03:04:05.006Z [rank1]: step 1", (1,)),
        ("step 1", ()),
        ("10/100 step 1", ()),
        ("03:04:05 step 1", ()),
    ],
)
def test_labels_of_launchers(line: str, numbers: tuple[int, ...]) -> None:
    found, begin = label_of(line)
    assert found == numbers and (not numbers or line[begin:] == "step 1")


@pytest.mark.parametrize(
    ("text", "value", "off"),
    [
        ("12", 12, 0), ("1,000", 1000, 0), ("99.00", 99, 0), ("1e+3", 1000, 5), ("1.01e+3", 1010, 5),
        ("9.95e+3", 9950, 5), ("1.2k", 1200, 50), ("1.20k", 1200, 5), ("123k", 123000, 500),
    ],
)  # fmt: skip
def test_numbers_as_programs_round_them(text: str, value: float, off: float) -> None:
    assert number_in(text) == pytest.approx((value, off))


@pytest.mark.parametrize("text", ["", "nan", "-3", "1.2.3", "1e999", "9" * 400, "k", "1e-999999999999"])
def test_what_is_no_number(text: str) -> None:
    assert number_in(text) in (None, (0.0, 0.0))


@pytest.mark.parametrize(
    ("line", "rate"),
    [
        ("tps: 6,150  tflops: 301.20", (6150, False)),
        ("tokens per gpu per second (tgs): 1234.5 | TFLOPs: 45.1", (1234.5, True)),
        ("TFLOP/s/device: 451.2, Tokens/s/device: 8123.4, total_weights: 3", (8123.4, True)),
        ("throughput (token/sec/GPU): 1234.0 |", (1234, True)),
        ("dt: 100ms | tok/sec: 1,096,321 | mfu: 47", (1096321, False)),
        ("It/sec 3.2, Tokens/sec 1234.5, Trained Tokens 2345", (1234.5, False)),
        ("250.12 ms | 45.1% bf16 MFU | 2096123 tok/s", (2096123, False)),
        ("tokens_per_second_per_gpu:1234.5 peak", (1234.5, True)),
        ("tps 12345.67(6172.8/gpu)", (12345.67, False)),
        ("loss=2.1, tokens/s=1.2k]", (1200, False)),
        ("'train_tokens_per_second': '123.4'", (123.4, False)),
        ("12.0 samples/s, steps: 10, 300 TFLOP/s", None),
    ],
)
def test_rates_of_tokens(line: str, rate: tuple[float, bool] | None) -> None:
    assert token_rate_in(line) == rate


def test_tokens_so_far() -> None:
    assert total_tokens_in("consumed tokens:  32768 | lm loss: 1") == 32768
    assert total_tokens_in("'num_input_tokens_seen': 4096") == 4096
    assert total_tokens_in("tokens: 5") is None

"""Secrets and control characters do not get into what is shown or kept."""

import shlex
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.masking import MASK, masked_arguments, masked_environment, printable, without_secrets


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
    command = "env HF_TOKEN=abc train.py --hf-token abc '--api_key=x y' --wandb-key k --lr 3e-4 --num_tokens=7"
    shown = "env HF_TOKEN=*** train.py --hf-token *** --api_key=*** --wandb-key *** --lr 3e-4 --num_tokens=7"
    assert masked_arguments(shlex.split(command)) == shown.split()


def test_an_option_without_a_value_masks_no_other_option() -> None:
    assert masked_arguments(["x", "--use-auth-token", "--model", "m"]) == ["x", "--use-auth-token", "--model", "m"]


SECRET_COMMANDS = [
    "HF_TOKEN=s3cr3t0== x",
    "--password=a=s3cr3t0",
    "x --env=API_KEY=s3cr3t0",
    "x --from-literal=password=s3cr3t0",
    "curl -ume:s3cr3t0 h",
    "curl --oauth2-bearer s3cr3t0 h",
    "x --hf-key s3cr3t0",
    "x ++trainer.wandb_token=s3cr3t0",
    "x +token=s3cr3t0",
    "x --conn 'Server=h;Password=s3cr3t0;'",
    'x --json \'{"password":"s3cr3t0"}\'',
    "curl 'https://h?key=s3cr3t0'",
    "curl -H 'Authorization: Bearer s3cr3t0' http://x",
    "curl --header 'authorization: Basic s3cr3t0'",
    "curl -H 'X-Api-Key: s3cr3t0'",
    "curl -H 'PRIVATE-TOKEN: s3cr3t0'",
    "curl -u me:s3cr3t0 http://x",
    "curl --user me:s3cr3t0",
    "curl -H 'Cookie: session=s3cr3t0; a=b'",
    "x --password s3cr3t0",
    "x --password=s3cr3t0",
    "x --db-password s3cr3t0",
    "x --passwd=s3cr3t0",
    "x --passphrase s3cr3t0",
    "mysql -u root -p s3cr3t0",
    "mysql -ps3cr3t0 db",
    "/usr/bin/mysqldump -ps3cr3t0",
    "sshpass -p s3cr3t0 ssh h",
    "docker login -u me -p s3cr3t0",
    "redis-cli -a s3cr3t0",
    "curl http://x && redis-cli -a s3cr3t0",
    "time curl redis-cli -a s3cr3t0",
    "x --token s3cr3t0",
    "x --hf-token=s3cr3t0",
    "x --hf_token s3cr3t0",
    "x --api-key s3cr3t0",
    "x --wandb_key=s3cr3t0",
    "x --secret s3cr3t0",
    "x --client-secret=s3cr3t0",
    "x --access-token s3cr3t0",
    "x --private-key=s3cr3t0",
    "env HF_TOKEN=s3cr3t0 x",
    "env WANDB_API_KEY=s3cr3t0",
    "AWS_SECRET_ACCESS_KEY=s3cr3t0",
    "OPENAI_KEY=s3cr3t0",
    "DB_PASSWORD=s3cr3t0",
    "MYSECRET=s3cr3t0",
    "PGPASSWORD=s3cr3t0",
    "TOKEN_VALUE=s3cr3t0",
    "MY_KEY_PROD=s3cr3t0",
    "GITHUB_TOKEN=s3cr3t0",
    "MYSQL_PWD=s3cr3t0",
    "APIKEY=s3cr3t0",
    "TOKEN=12345s3cr3t0",
    "trainer.hub_token=s3cr3t0",
    "api_key=s3cr3t0",
    "x http://u:s3cr3t0@h/x",
    "x 'https://h/a?token=s3cr3t0&b=1'",
    "x 'https://h?access_token=s3cr3t0'",
    "x 'https://h?api_key=s3cr3t0'",
    "x redis://:s3cr3t0@h:6379/0",
    "x 's3://h?X-Amz-Signature=s3cr3t0'",
    "bash -c 'curl -H '\"'\"'Authorization: Bearer s3cr3t0'\"'\"' http://x | sh'",
    "bash -c 'HF_TOKEN=s3cr3t0 python t.py --lr 1'",
    "bash -c 'python t.py --password s3cr3t0 && ls'",
    "bash -c 'mysql -ps3cr3t0 -e '\"'\"'select 1'\"'\"''",
    "bash -c 'export API_TOKEN='\"'\"'s3cr3t0'\"'\"'; x'",
]
"""Command lines as a user writes them; the secret is s3cr3t0."""

HARMLESS_COMMANDS = [
    "x --no-token 5",
    "x --signature-method v4",
    "x --env=NCCL_DEBUG=INFO",
    "x --set=a=b",
    "x ++trainer.lr=1",
    "x '{\"lr\":1}'",
    "x --define=key_dim=4",
    "x -p 8",
    "mkdir -p out",
    "docker run -p 8080:80 img",
    "ssh -p 2222 h",
    "psql -p 5432",
    "x -p8",
    "x --tokenizer llama",
    "x --max-tokens 5",
    "x --max_tokens=5",
    "x --key-size 2048",
    "x --num-key-value-heads 8",
    "x --tokens-per-sample 512",
    "x --pad-token '<pad>'",
    "x '--eos_token=</s>'",
    "x --max-new-tokens 9",
    "x --token-budget 4096",
    "x --sort-key name",
    "x --key length",
    "x --keys a,b",
    "TOKENIZERS_PARALLELISM=false",
    "MAX_TOKENS=5",
    "NUM_TOKENS=5",
    "KEY_SIZE=2048",
    "HOTKEY=1",
    "KEYBOARD=us",
    "PWD=/root/x",
    "model.key_dim=64",
    "model.num_key_value_heads=8",
    "x --tokenizer-path /t/tok.model",
    "x --password-file /run/pw",
    "x --ssl-key-file /etc/k.pem",
    "x --secret-name vault",
    "x --pass 2",
    "x --num-passes 2",
    "x --port=8",
    "x -P 8",
    "NCCL_DEBUG=INFO",
    "CUDA_VISIBLE_DEVICES=0,1",
    "x --tokens 1e9",
    "x hf_transfer_enabled",
    "sk-learn-like-pipeline-model",
    "x --model meta-llama/Llama-3-8B",
    "x --lr 3e-4",
    "'http://host:5000/a?page=2'",
    "x --use-token-type-ids",
    "curl -u me http://x",
    "x --seed 1",
    "MONKEY=see",
    "x --bos-token-id 1",
    "--image-token-id 32000",
    "x --per-token-loss",
    "git log -p",
    "x --hidden-size=64",
    "x --basic yes",
    "x --author me",
    "x --signal 9",
    "x --design=x",
    "x --compass n",
    "bash -c 'python t.py -p 8 --max-tokens 5 | tee log; mkdir -p out && cp a b'",
    "nvidia-smi -q",
    "echo 'tokens: 512 loss per token: 0.53'",
    "python -c 'd = {'\"'\"'token'\"'\"': 5, '\"'\"'key'\"'\"': '\"'\"'name'\"'\"'}; print(d['\"'\"'key'\"'\"'])'",
    "7zip.py x",
    "x --unzip a",
    "rsync -avP a b",
    "scp -P 22 a",
    "x --keep all",
    "x --monkey-patch a",
]

SECRET_TEXTS = [
    "Authorization: Bearer s3cr3t0abcdef",
    "{'Authorization': 'Bearer s3cr3t0abcdef'}",
    '{"hf_token": "s3cr3t0", "a": 1}',
    "password: s3cr3t0",
    "api_key=s3cr3t0",
    "login with --token s3cr3t0 failed",
    "DB_PASSWORD='s3cr3t0' x",
    "error at https://u:s3cr3t0@h/",
    "'api_key': 's3cr3t0',",
    'password="s3cr3t0 x"',
]

HARMLESS_TEXTS = [
    "step 5 | loss 2.1 | tokens/s 5000 | token 5",
    "tokens: 5 per_token: 0.5",
    "KeyError: 'key'",
    "raise KeyError(key)",
    "eos_token: </s>, pad_token: <pad>",
    "Key: value pairs",
    "key=5 token=128",
    "[rank0]: Traceback (most recent call last):",
    "bearer of bad news",
    '  File "x.py", line 5, in token',
    "iteration 10/ 100 | consumed tokens: 4096 | elapsed: 5.0 ms",
    "ValueError: token ids must be positive",
    "num_key_value_heads: 8",
    "signature: (a: int) -> str",
    "def f(token: str) -> None:",
]

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
KNOWN = [
    "hf_abcdefghijklmnopqrstuvwxyzABCDEFGH",
    "sk-abcdefghijklmnopqrstuvwxyz012345",
    "sk-proj-abc_DEF-0123456789abcdef",
    "sk-ant-api03-abcdefgh12345",
    "AKIAIOSFODNN7EXAMPLE",
    "ghp_0123456789abcdefghijABCDEFGHIJ012345",
    "github_pat_11ABCDEFG0abcdefghijkl_xyz",
    "glpat-abcdefghijklmnop1234",
    JWT,
]


@pytest.mark.parametrize("command", SECRET_COMMANDS)
def test_a_command_is_kept_without_its_secret(command: str) -> None:
    masked = masked_arguments(shlex.split(command))
    assert "s3cr3t0" not in " ".join(masked) and MASK in " ".join(masked)
    assert len(masked) == len(shlex.split(command))
    assert masked_arguments(masked) == masked
    assert "s3cr3t0" not in without_secrets(f"it ran: {command}, and failed")


@pytest.mark.parametrize("command", HARMLESS_COMMANDS)
def test_what_is_no_secret_is_kept(command: str) -> None:
    assert masked_arguments(shlex.split(command)) == shlex.split(command)
    assert without_secrets(command) == command


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_an_output_is_kept_without_its_secret(text: str) -> None:
    assert "s3cr3t0" not in without_secrets(text)


@pytest.mark.parametrize("text", HARMLESS_TEXTS)
def test_the_rest_of_an_output_is_kept(text: str) -> None:
    assert without_secrets(text) == text


@pytest.mark.parametrize("secret", KNOWN)
def test_a_secret_that_shows_what_it_is_is_masked_anywhere(secret: str) -> None:
    for one in (secret, f"--arg={secret}", f"run {secret} now", f"https://{secret}@host/x"):
        assert secret[:12] not in masked_arguments(["x", one])[1]
        assert secret[:12] not in without_secrets(one)


def test_a_private_key_is_masked_whole() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\nMIIabc\ndef\n-----END RSA PRIVATE KEY-----"
    assert without_secrets(f"a\n{key}\nb") == "a\n***\nb"


def test_variables_are_masked_by_their_names() -> None:
    kept = {"NCCL_DEBUG": "INFO", "MAX_TOKENS": "5", "CUDA_VISIBLE_DEVICES": "0,1", "TOKENIZERS_PARALLELISM": "false"}
    secret = dict.fromkeys(
        ["HF_TOKEN", "WANDB_API_KEY", "MY_SECRET", "DB_PASSWORD", "db_password", "MY_KEY"], "s3cr3t0"
    )
    assert masked_environment(kept | secret) == kept | dict.fromkeys(secret, MASK)


@pytest.mark.parametrize("part", ["://", "\"'", "a-token", "key=", "-p ", "cookie: ", "a.b-", "eyJaaaaaaa."])
def test_a_text_that_is_made_to_be_slow_is_not(part: str) -> None:
    begun_s = time.process_time()
    without_secrets(part * 10_000 + "key curl")
    assert time.process_time() - begun_s < 20.0  # quadratic, it takes minutes


def test_a_terminal_is_given_nothing_to_obey() -> None:
    assert printable("a\x1b[2Jb\rc\x9bd\x07\n\te") == "a\\x1b[2Jb\\x0dc\\x9bd\\x07\n\te"
    assert printable("Zürich 25 °C ±2") == "Zürich 25 °C ±2"


@given(st.text())
def test_no_control_character_is_left(text: str) -> None:
    assert all(each in "\n\t" or (ord(each) >= 32 and not 127 <= ord(each) < 160) for each in printable(text))

"""What is taken for a secret, and what is not: a name too many makes a record useless, one too few tells."""

import pytest

from spmdkit.foundation import redact

NAMES = ["api_token", "password", "AWS_SECRET_ACCESS_KEY", "hfToken", "wandb_api_key", "db-password", "my_secret"]
NAMES += ["credentials", "Authorization", "auth", "apiKey", "ssh_key", "PGPASSWD"]
PLAIN = ["tokenizer", "vocab_size", "key_dim", "num_keys", "keys", "kv_heads", "pad_token", "eos_token", "mask_token"]
PLAIN += ["monkey", "passes", "compass", "author", "learning_rate", "key"]


def test_the_name_decides():
    assert [name for name in NAMES if redact.redact_value({name: "hunter2"}) != {name: "***"}] == []
    assert [name for name in PLAIN if redact.redact_value({name: "hunter2"}) != {name: "hunter2"}] == []


def test_numbers_and_what_lies_deeper():
    given = {"tokens": 1024, "password": 1234, "list": [{"token": "abc"}, "x"], "secrets": {"a": "b"}}
    expected = {"tokens": 1024, "password": "***", "list": [{"token": "***"}, "x"], "secrets": {"a": "***"}}
    assert redact.redact_value(given) == expected


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("get https://me:hunter2@host/a?b=c now", "get https://***@host/a?b=c now"),
        ("https://host/a?access_token=hunter2&b=c", "https://host/a?access_token=***&b=c"),
        ("https://bucket/x?X-Amz-Signature=hunter2", "https://bucket/x?X-Amz-Signature=***"),
        ("Authorization: Bearer abcdefgh.ijkl", "Authorization: Bearer ***"),
        ("401 for hf_abcdefghijklmnopqrstuv here", "401 for *** here"),
        ("key AKIAABCDEFGHIJKLMNOP", "key ***"),
        ("AccountName=me;AccountKey=abc+/def==;EndpointSuffix=x", "AccountName=me;AccountKey=***;EndpointSuffix=x"),
        ("Endpoint=sb://x/;SharedAccessKey=hunter2;a=b", "Endpoint=sb://x/;SharedAccessKey=***;a=b"),
        ("post https://hooks.slack.com/services/T0/B0/abc now", "post https://hooks.slack.com/services/*** now"),
        ("https://discord.com/api/webhooks/12/ab-c_d", "https://discord.com/api/webhooks/***"),
        ("https://me.webhook.office.com/webhookb2/1-2@3/x", "https://me.webhook.office.com/***"),
        ("https://api.telegram.org/bot12:ab-c/send", "https://api.telegram.org/bot***"),
        ("https://x.logic.azure.com/a?sv=1&sig=abc%2F", "https://x.logic.azure.com/a?sv=1&sig=***"),
        ("eyJabcdefghij.eyJabcdefghij.abcdef", "***"),
        ("wandb_key=0123456789abcdef, sort_key=name", "wandb_key=***, sort_key=name"),
        ("pat=0123456789abcdef path=0123456789abcdef", "pat=*** path=0123456789abcdef"),
        ("password=hunter2, user=me", "password=***, user=me"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", "***"),
        ("step 5: train_data[5] raised OSError: disk gone", "step 5: train_data[5] raised OSError: disk gone"),
        (
            "--xla_cpu_use_fusion_emitters=false --xla_dump_to=/tmp/x",
            "--xla_cpu_use_fusion_emitters=false --xla_dump_to=/tmp/x",
        ),
    ],
)
def test_a_secret_in_a_text_is_hidden(text, kept):
    assert redact.redact_text(text) == kept
    assert redact.redact_lines(f"before\n{text}\nafter\n") == f"before\n{kept}\nafter\n"


TAIL = "0123456789abcdefABCD0123456789abcdefABCD"
PREFIXES = [
    "hf_",
    "sk-",
    "sk-proj-",
    "sk_live_",
    "ghp_",
    "gho_",
    "github_pat_",
    "glpat-",
    "glrt-",
    "npm_",
    "pypi-",
    "SG.",
]
PREFIXES += ["xoxb-", "xapp-1-", "AIza", "ya29.", "hvs.", "dp.pt.", "shpat_", "lin_api_", "dckr_pat_", "nvapi-", "gsk_"]
PREFIXES += ["r8_", "pul-", "PMAK-", "pnu_", "glsa_", "dop_v1_", "LTAI", "AKCp", "rubygems_", "pscale_tkn_", "sntryu_"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_tokens_of_services_are_hidden(prefix):
    assert redact.redact_text(f"refused: {prefix}{TAIL}, again") == "refused: ***, again"
    assert redact.redact_lines(f"a\nrefused: {prefix}{TAIL}\n") == "a\nrefused: ***\n"


@pytest.mark.parametrize("text", ["step 5/10  loss 2.34  12345 tokens/s", "examples_per_second=12 a-b-c=d", "-" * 200])
def test_other_text_is_unchanged(text):
    assert redact.redact_text(text) == redact.redact_lines(text) == text


SHAPED = {"wandb_key": "0123456789abcdef", "pat": "0123456789abcdef", "wandbKey": "0123456789abcdef", "a-key": "x" * 16}
READABLE = {"image_key": "pixels", "pat": "short", "sort_key": "a text with many words", "path": "0123456789abcdef"}
READABLE |= {"keyboard": "0123456789abcdef", "monkey": "0123456789abcdef", "key": 1234567890123456}


def test_values_of_keys_are_hidden_by_shape(monkeypatch):
    assert redact.redact_value(SHAPED) == dict.fromkeys(SHAPED, "***")
    assert redact.redact_value(READABLE) == READABLE
    assert redact.redact_value({"wandb_key": "0123456789abcde"}) == {"wandb_key": "0123456789abcde"}, "15 characters"
    monkeypatch.setattr(redact, "_known", set())
    redact.register_secrets([{"wandb_key": "0123456789abcdef"}, READABLE])
    assert redact.redact_text("0123456789abcdeg and 0123456789abcdef") == "0123456789abcdeg and ***"
    assert redact._known == {"0123456789abcdef"}


def test_named_secrets_are_hidden_in_messages(monkeypatch):
    monkeypatch.setattr(redact, "_known", set())
    redact.register_secrets({"task_args": {"api_token": "zq81xxvv", "width": "ordinary"}})
    assert redact.redact_text("refused: zq81xxvv of ordinary") == "refused: *** of ordinary"
    monkeypatch.setenv("SOME_PASSWORD", "correct horse")
    monkeypatch.setenv("PWD", "/home/me/project")
    assert redact.redact_text("/home/me/project/task.py:3") == "/home/me/project/task.py:3"
    assert redact.redact_text("it is correct horse") == "it is ***"


def test_secrets_of_commands_and_configs_are_hidden(monkeypatch, tmp_path):
    monkeypatch.setattr(redact, "_known", set())
    config = tmp_path / "run.yaml"
    config.write_text("task_args: {dsn: of-the-file, plain: [{password: of-a-list}], width: ordinary}\n")
    (tmp_path / "bomb.yaml").write_text("a: &a {password: of-the-bomb}\nb: *a\n")
    named = ["train", str(config), str(tmp_path / "bomb.yaml"), "gone.yaml", "task_args.db_pwd=of-an-override"]
    named += ["task_args={auth: [deep]}", "a={"]
    redact.register_command_secrets([*named, "hooks=[{mine.py:hook: {api_key: of-a-hook}}]"])
    assert redact._known == {"of-the-file", "of-a-list", "of-an-override", "of-a-hook"}
    monkeypatch.setattr(redact, "_known", set())
    redact.register_command_secrets(named, files=False)
    assert redact._known == {"of-an-override"}

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

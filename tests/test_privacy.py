"""Tests of secrets in settings and texts."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_recorder.privacy import HIDDEN, LEFT_OUT, hide_places, hide_secrets

SECRETS: dict[str, Any] = {
    "api_key": "hunter2",
    "APIKey": "hunter2",
    "OPENAI_API_KEY": "hunter2",
    "wandb_api_keys": ("hunter2", "hunter3"),
    "aws_secret_access_key": "hunter2",
    "private_key_path": "/home/me/id",
    "token": "hunter2",
    "hfToken": "hunter2",
    "github_token_2": "Hunter-2",
    "accesstoken": "abcdefgh",
    "refresh_tokens": ["8d7f8d7f8d7f8d7f"],
    "password": "hunter2",
    "db_passwd": 1234,
    "card_pin": 1234,
    "user.Password": "hunter2",
    "client_secret": "hunter2",
    "secrets": "hunter2",
    "credentials": "hunter2",
    "auth": "me:hunter2",
    "session_cookie": "hunter2",
    "sentry_dsn": "hunter2",
    "slack_webhook_url": "hunter2",
    "my_key": "0123456789abcdef0123456789abcdef",
    "wandb_key": "hunter2",
    "OPENAI_KEY": "hunter2",
    "neptune_key_prod": "a1b2c3d4-1234-1234-1234-123456789abc",
}

ORDINARY: dict[str, Any] = {
    "num_tokens": 128,
    "max_tokens": 4096,
    "tokens": "words",
    "tokenizer": "bert-base-uncased",
    "tokenizer_path": "data/bpe.json",
    "token_dropout": 0.1,
    "token_mixer": "pooling",
    "token": "mean",
    "pad_token": "<pad>",
    "mask_token": "<|mask|>",
    "eos_token": "endoftext",
    "class_token": True,
    "api_token": None,
    "use_auth_token": False,
    "password": "",
    "key_dim": 64,
    "key": "image",
    "batch_key": "image_features_2",
    "keys": ("image", "label"),
    "monitor_key": "val/loss_epoch_mean_2",
    "password_length": 12,
    "secret_fraction": 0.5,
    "author": "someone",
    "keyboard": "qwerty",
    "passes": 3,
    "spin": 1,
    "pin_memory": True,
    "bypass": "none",
    "optimizer": "AdamW(lr=0.1, betas=(0.9, 0.99))",
    "url": "https://host:8080/data?split=train#part",
    "repo": "git@github.com:me/data.git",
    "note": "a token is a word: see the password manager",
    "sk": "sk-learn",
    "model": "hf_internal_testing_tiny_random_bert",
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_known_by_their_names(name: str) -> None:
    """The value of a setting whose name denotes a secret is hidden, and so is each one of a list."""
    value = SECRETS[name]
    hidden = type(value)([HIDDEN] * len(value)) if isinstance(value, (list, tuple)) else HIDDEN
    assert hide_secrets(value, name) == hidden
    assert hide_secrets({"outer": [{name: value}]}) == {"outer": [{name: hidden}]}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_settings_are_shown(name: str) -> None:
    """Settings that have a word such as token or key in another meaning keep their values."""
    assert hide_secrets(ORDINARY[name], name) == ORDINARY[name]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:hunter2@host:5432/db", "postgresql://(hidden)@host:5432/db"),
        ("https://hunter2@host/path@v1", "https://(hidden)@host/path@v1"),
        ("ftp://me:hun/ter2@host", "ftp://(hidden)@host"),
        ("me:hunter2@host/db", "(hidden)@host/db"),
        ("https://host/a?split=train&api_key=hunter2&x=1", "https://host/a?split=train&api_key=(hidden)&x=1"),
        ("Client(url='https://host', token='hunter2', n=3)", "Client(url='https://host', token=(hidden), n=3)"),
        ('{"db": {"password": "hun ter, 2"}, "n": 3}', '{"db": {"password": (hidden)}, "n": 3}'),
        ("train.py --lr 0.1 --api-key hunter2 --n 3", "train.py --lr 0.1 --api-key (hidden) --n 3"),
        ("train.py --lr=0.1 --api-key=hunter2 --n=3", "train.py --lr=0.1 --api-key=(hidden) --n=3"),
        ("Basic bWU6aHVudGVyMg==", "Basic (hidden)"),
        ("AccountName=me;AccountKey=hunter2==;Suffix=x", "AccountName=me;AccountKey=(hidden);Suffix=x"),
        ("401 for Authorization: Bearer hunter2hunter2", "401 for Authorization: (hidden)"),
        ("curl -H 'Bearer hunter2hunter2'", "curl -H 'Bearer (hidden)'"),
        ("wrong key sk-proj-abcdefgh12345678abcd given", "wrong key (hidden) given"),
        ("hf_AbCdEfGhIjKlMnOpQr", "(hidden)"),
        ("see https://hooks.slack.com/services/T0/B0/hunter2", "see https://hooks.slack.com/services/(hidden)"),
        ("key:\n-----BEGIN RSA PRIVATE KEY-----\nMIIhunter2", "key:\n(hidden)"),
    ],
)
def test_secrets_are_known_by_their_forms(text: str, shown: str) -> None:
    """In any text, addresses lose their users, and named values and well-known forms of secrets are hidden."""
    assert hide_secrets(text) == shown
    assert hide_secrets({"note": (shown,)}) == {"note": (shown,)}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("it failed: BadRow: Anna, 31. To know it: wait.", "it failed: BadRow. To know it: wait."),
        ("ValueError: no number: 'Anna'\nin row 3", "ValueError"),
        ("Error: the mean is 0.1 of /home/me/net.py:4", "Error"),
        ("the error of net.2 is large: 0.1", "the error of net.2 is large: 0.1"),
    ],
)
def test_messages_of_errors_are_left_out(text: str, shown: str) -> None:
    """The message of an error, which may quote a sample, is left out of a text for others; its class stays."""
    assert hide_places(text) == shown


@pytest.mark.parametrize("unit", ["a", "a.", "a:", "key=", "--a ", "'", "://", "://a:b", "a:b@", "sk-ant-"])
def test_long_texts_are_searched_quickly(unit: str) -> None:
    """The search for secrets is linear in the length of a text: 100,000 characters take no minute."""
    text = unit * (100_000 // len(unit))
    assert len(hide_secrets(text)) <= len(text) * len(HIDDEN)
    assert len(hide_places(text)) <= len(text) * len(LEFT_OUT)

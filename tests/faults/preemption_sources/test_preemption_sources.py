"""Watchers against a server of this test that speaks as the clouds' metadata servers do: every file of the folder is
found and tried."""

import http.server
import json
import os
import threading
import time

import pytest

from spmdkit.errors import ConfigError
from spmdkit.foundation import plugins

KINDS = plugins.names("preemption_sources")
OPTIONS = {"file": {"path": "preempt"}}


class Metadata(http.server.BaseHTTPRequestHandler):
    """`server.state`: what the clouds say, and `server.asked`, what was asked for."""

    def do_PUT(self):
        self.server.asked.append(self.path)
        lives = self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")
        self.answer("token-1" if lives and self.path == "/latest/api/token" else None, 400)

    def do_GET(self):
        self.server.asked.append(self.path)
        state = self.server.state
        if state.get("broken"):
            return self.answer(None, 503)
        if self.path.startswith("/computeMetadata/v1/instance/"):
            if self.headers.get("Metadata-Flavor") != "Google":
                return self.answer(None, 403)
            return self.answer(
                state.get(
                    self.path.rpartition("/")[2],
                    {"preempted": "FALSE", "maintenance-event": "NONE"}[self.path.rpartition("/")[2]],
                )
            )
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers.get("X-aws-ec2-metadata-token") != state.get("token", "token-1"):
                return self.answer(None, 401)
            return self.answer(json.dumps(state["action"]) if "action" in state else None, 404)
        self.answer(None, 404)

    def answer(self, text, otherwise=404):
        self.send_response(200 if text is not None else otherwise)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def cloud(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Metadata) as server:
        server.state, server.asked = {}, []
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        monkeypatch.setenv("GCE_METADATA_HOST", host)
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"http://{host}/")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # a proxy is never asked
        yield server
        server.shutdown()


@pytest.fixture
def source(request, tmp_path, monkeypatch, cloud):
    monkeypatch.chdir(tmp_path)
    return plugins.make("preemption_sources", {request.param: OPTIONS.get(request.param, {})})


def give_notice(kind, cloud):
    """Lets the outside say that this machine goes."""
    if kind == "gce":
        cloud.state["preempted"] = "TRUE"
    elif kind == "aws":
        cloud.state["action"] = {"action": "terminate", "time": "2026-11-23T09:00:00Z"}
    elif kind == "file":
        with open("preempt", "w"):
            os.utime("preempt", (time.time() + 1, time.time() + 1))
    else:
        raise AssertionError(f"say here how {kind} gives notice")


@pytest.mark.parametrize(("source", "kind"), [(k, k) for k in KINDS], indirect=["source"], ids=KINDS)
def test_notice_is_empty_until_it_comes(source, kind, cloud):
    assert [source.notice() for _ in range(3)] == ["", "", ""]
    give_notice(kind, cloud)
    why = source.notice()
    assert why and len(why) < 200 and "\n" not in why
    assert source.every_s > 0


@pytest.mark.parametrize("source", ["gce", "aws"], indirect=True)
def test_failing_server_gives_no_notice(source, cloud):
    cloud.state["broken"] = True
    with pytest.raises(OSError):
        source.notice()
    del cloud.state["broken"]
    assert source.notice() == ""


@pytest.mark.parametrize("source", ["gce"], indirect=True)
def test_google_maintenance_without_migration_is_a_notice(source, cloud):
    cloud.state["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert source.notice() == ""
    cloud.state["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert "maintenance" in source.notice()


@pytest.mark.parametrize("source", ["aws"], indirect=True)
def test_aws_token_is_reused_and_renewed(source, cloud):
    assert [source.notice() for _ in range(3)] == [""] * 3
    assert cloud.asked.count("/latest/api/token") == 1
    cloud.state["token"] = "another"
    with pytest.raises(OSError):
        source.notice()
    cloud.state["token"] = "token-1"
    assert source.notice() == ""
    assert cloud.asked.count("/latest/api/token") == 2


def test_file_from_before_the_start_is_ignored(tmp_path):
    old = tmp_path / "preempt"
    old.touch()
    os.utime(old, (time.time() - 60, time.time() - 60))
    source = plugins.make("preemption_sources", {"file": {"path": str(old)}})
    assert source.notice() == ""
    os.utime(old, (time.time() + 1, time.time() + 1))
    assert source.notice() == f"the file {old}"


def test_unknown_sources_and_options_are_rejected():
    for choice, said in (
        ("gcp", "gce"),
        ({"file": {}}, "needs path"),
        ({"file": {"path": 3}}, "file.path is 3"),
        ({"gce": {"every": 1}}, "every_s"),
    ):
        with pytest.raises(ConfigError, match=said):
            plugins.make("preemption_sources", choice)

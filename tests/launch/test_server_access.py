"""Who may connect, and the plain requests that a server answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import MODEL, FakePipeline, RunningServer, running_server
from websockets.exceptions import InvalidStatus

from vcpipe.launch.server.security import Gate


# -------------------------------------------------------------------------------------------------------- who may connect
@pytest.mark.parametrize(("origin", "admitted"), [(None, True), ("http://localhost:3000", True), ("null", False)])
def test_origins(server: RunningServer, pipeline: FakePipeline, origin: Any, admitted: bool) -> None:
    if admitted:
        with server.connect(origin=origin) as client:
            client.expect("session.created")
        return
    with pytest.raises(InvalidStatus) as caught:
        server.connect(origin=origin)
    assert caught.value.response.status_code == 403
    assert server.server.reservations.taken == 0


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    with running_server(FakePipeline().start, gate=Gate("K1")) as server:
        yield server


def test_keys_on_the_upgrade(keyed: RunningServer) -> None:
    for headers in ({}, {"Authorization": "Bearer K2"}):
        with pytest.raises(InvalidStatus) as caught:
            keyed.connect(additional_headers=headers)
        assert caught.value.response.status_code == 401
        assert b"K1" not in (caught.value.response.body or b"")
    with keyed.connect(additional_headers={"Authorization": "Bearer K1"}) as client:
        client.expect("session.created")
    with keyed.connect(subprotocols=["realtime", "openai-insecure-api-key.K1"]) as client:
        client.expect("session.created")
        assert client.socket.subprotocol == "realtime"
    with pytest.raises(InvalidStatus):
        keyed.connect(subprotocols=["realtime", "openai-insecure-api-key.K2"])


def test_keys_on_plain_requests(keyed: RunningServer) -> None:
    for path in ("/v1/models", "/metrics", "/v1/responses"):
        status, headers, body = keyed.get(path)
        assert (status, headers["www-authenticate"]) == (401, "Bearer")
        assert "K1" not in body
        assert keyed.get(path, Authorization="Bearer K1")[0] in (200, 501)
    assert keyed.get("/health")[0] == 200
    assert keyed.get("/")[0] in (200, 404)


# ----------------------------------------------------------------------------------------------------------- plain requests
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
def test_routes_of_chat_models_point_to_realtime(server: RunningServer, path: str) -> None:
    for method in ("GET", "POST"):
        status, _, body = server.get(path, method)
        assert status == 501
        assert "/v1/realtime" in json.loads(body)["error"]["message"]


def test_other_routes(server: RunningServer, pipeline: FakePipeline) -> None:
    assert server.json("/v1/models")["data"][0]["id"] == MODEL
    assert server.get("/v1/realtime")[0] == 426
    assert server.json("/health")["status"] == "ready"
    assert server.get("/nothing/here")[0] == 404
    assert server.get("/../serve.py")[0] == 404
    for path in ("/nothing", "/", "/v1/models"):
        with pytest.raises(InvalidStatus):
            server.connect(path=path)


def test_the_page_may_load_and_reach_nothing_else(server: RunningServer) -> None:
    _, headers, _ = server.get("/")
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["worker-src"] == "'self'"
    assert policy["connect-src"] == f"'self' ws://127.0.0.1:{server.port} wss://127.0.0.1:{server.port}"
    assert headers["x-content-type-options"] == "nosniff"
    assert "evil" not in server.get("/", Host="evil.example; script-src *")[1]["content-security-policy"]

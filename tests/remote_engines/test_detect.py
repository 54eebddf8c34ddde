"""What is said of servers that do not say which experts tokens went to."""

from __future__ import annotations

from typing import Any

import pytest
from builders.remote_engines import KINDS, only_server, serving

from danlu.core.errors import ModelError
from danlu.remote_engines.detect import Demands, detect_server
from danlu.remote_engines.server_interface import ServerOptions


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_that_routes_are_not_replayed_is_told_or_refused(
    small_decoder: Any, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(kind, small_decoder()) as (engine, stand_in):
        (client,) = ServerOptions((stand_in.url,)).clients
        server = only_server(engine)
        assert type(detect_server(client, Demands())) is type(server)
        assert "experts" not in capsys.readouterr().err
        detect_server(client, Demands(routes=True))
        said = capsys.readouterr().err
        assert f"{server.name} does not say which experts tokens went to, so routers choose again" in said
        with pytest.raises(ModelError, match="rollout.routing_replay.*Use danlu serve --rollouts there, or leave"):
            detect_server(client, Demands(routes=True, routes_required=True))

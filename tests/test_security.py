"""What a model's folder, a server's address and a process of ours must not do or show."""

import base64
import json
import shutil

import pytest
from json_server import json_servers

from config import WORLD
from models.model import load_config, load_model, load_tokenizer
from plumbing.faults import Fault, OptimizerDown
from plumbing.outside import without_secrets
from reflect import Optimizer, describe_optimizer

# ---- a folder's own code


@pytest.fixture
def with_code(tmp_path, monkeypatch):
    """Makes a copy of the world's policy whose own code writes a file; whoever is asked whether to
    run it says yes."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    path = shutil.copytree(WORLD / "policy", tmp_path / "policy")
    (path / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Own: pass\n")

    def make(name, **changes):
        found = json.loads((path / name).read_text()) | changes
        (path / name).write_text(json.dumps(found))
        return str(path)

    yield make
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("load", [load_config, load_tokenizer, load_model])
def test_an_unknown_family_s_code_is_not_run(with_code, load):
    with_code(
        "tokenizer_config.json",
        tokenizer_class="Own",
        auto_map={"AutoTokenizer": ["own.Own", None]},
    )
    auto_map = {name: "own.Own" for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM")}
    path = with_code("config.json", model_type="unheard", auto_map=auto_map)
    with pytest.raises(Fault, match="custom code") as fault:
        load(path)
    assert path in str(fault.value) and "\n" not in str(fault.value)


def test_a_known_family_s_code_for_a_causal_lm_is_not_run(with_code):
    path = with_code("config.json", model_type="t5", auto_map={"AutoModelForCausalLM": "own.Own"})
    with pytest.raises(Fault, match="custom code"):
        load_model(path)


# ---- passwords and keys in addresses

SECRET = "ann:Gehe%2Fim42@{}/v1"


@pytest.mark.parametrize(
    "said, shown",
    [
        ("http://ann:Geheim@host:8000/v1", "http://host:8000/v1"),
        ("https://Geheim@host/v1?key=Geheim: HTTP 401", "https://host/v1: HTTP 401"),
        ("http://ann:Geh@eim@[::1]:8000", "http://[::1]:8000"),
        (
            "http://a:1,http://ann:Geh,eim@b:2/x?k=Geheim,https://c",
            "http://a:1,http://b:2/x,https://c",
        ),
        (
            "(http://h/?k=Geheim) 'http://h:80/?Geheim#Geheim', then",
            "(http://h/) 'http://h:80/', then",
        ),
        ("Invalid URL 'ann:Geheim@host/retrieve'", "Invalid URL 'host/retrieve'"),
        ("https://a.org/x,y. Done: 3:4", "https://a.org/x,y. Done: 3:4"),
    ],
)
def test_an_address_is_shown_without_its_secrets(said, shown):
    assert without_secrets(said) == shown


def test_what_an_address_hides_is_sent_and_not_shown():
    with json_servers() as serve:
        server = serve((401, {}, "no such key"), {"data": [{"id": "m"}]})
        url = "http://" + SECRET.format(f"127.0.0.1:{server.server_port}")
        optimizer = Optimizer(url, "m", retries=0)
        with pytest.raises(
            OptimizerDown, match=f"^{server.url}/v1/chat/completions: HTTP 401: no such key"
        ) as fault:
            optimizer.ask("Why?")
        assert [request[0] for request in server.requests] == ["/v1/chat/completions"]
        sent = base64.b64encode(b"ann:Gehe/im42").decode()
        assert server.requests[0][1]["Authorization"] == f"Basic {sent}"
    for text in (str(fault.value), describe_optimizer(optimizer)):
        assert "Geh" not in text and "ann" not in text

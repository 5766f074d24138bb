"""Flags of `penstock serve` from the environment."""
from __future__ import annotations

import pytest

from penstock.cli import main as cli
from penstock.config.base.errors import ConfigError
from penstock.config.settings.file import FromFile


def shown(capsys, *argv: str) -> dict[str, str]:
    """The resolved config."""
    assert cli.main([*argv, "--print-config"]) == 0, capsys.readouterr().err
    return dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())


def test_a_variable_is_a_flag_and_the_command_line_wins(monkeypatch, tmp_path, capsys) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: other\nport: 1\nmax_num_seqs: 3\npage-size: 32\nsparse-dense-layers: [5]\n"
                    "sparse-top-k: 96\n")
    for name, value in {"MODEL": "demo", "PORT": "2", "PAGE_SIZE": "64", "PREFIX_CACHE": "off", "NGL": "0",
                        "ENABLE_HIERARCHICAL_CACHE": "", "SPARSE_DENSE_LAYERS": "0,1", "CLIP_MAX_TOKENS": "1"}.items():
        monkeypatch.setenv(f"PENSTOCK_ARG_{name}", value)
    monkeypatch.setenv("PENSTOCK_PORT", "tcp://10.0.0.1:80")           # as Kubernetes sets it
    found = shown(capsys, "serve", "--config", str(file), "--page-size", "8")
    assert [found[name] for name in ("model", "port", "max_num_seqs", "page_size", "prefix_cache", "gpu_layers",
                                     "sparse_dense_layers", "clip_max_tokens")] == [
        "demo", "2", "3", "8", "False", "0", "0,1", "True"]
    assert shown(capsys, "serve", "other-model", "--sparse-top-k", "96")["model"] == "other-model"
    assert shown(capsys, "generate", "demo")["page_size"] == "-", "of another command"


@pytest.mark.parametrize(("name", "value", "said"), [
    ("MAX_MODEL_LENGHT", "1", r"\$PENSTOCK_ARG_MAX_MODEL_LENGHT: .* did you mean \$PENSTOCK_ARG_MAX_MODEL_LEN\?"),
    ("TP", "1", r"\$PENSTOCK_ARG_TENSOR_PARALLEL_SIZE, \$PENSTOCK_ARG_TP: both are for the same flag: set one"),
    ("MODEL_PATH", "other", r"\$PENSTOCK_ARG_MODEL, \$PENSTOCK_ARG_MODEL_PATH: both are for the same flag"),
    ("PREFIX_CACHE", "perhaps", r"\$PENSTOCK_ARG_PREFIX_CACHE=perhaps: 1 or 0 is needed")])
def test_a_variable_of_no_flag_or_value_is_refused(monkeypatch, name, value, said) -> None:
    for other, set_to in {"TENSOR_PARALLEL_SIZE": "2", "MODEL": "demo", name: value}.items():
        monkeypatch.setenv(f"PENSTOCK_ARG_{other}", set_to)
    with pytest.raises(ConfigError, match=said):
        FromFile([], environment=True)
    assert FromFile(["demo"]).words == ["demo"]


def test_an_error_names_the_variable(monkeypatch, capsys) -> None:
    monkeypatch.setenv("PENSTOCK_ARG_PORT", "70000")
    assert cli.main(["serve", "demo", "--print-config"]) == 2
    assert "error: $PENSTOCK_ARG_PORT: --port 70000" in capsys.readouterr().err

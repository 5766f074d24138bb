"""Moves `penstock.serve` to the rooms cli, llm, api, engine and text, and rewrites what names its modules.

    python tools/move_rooms.py

Branches that began before the move run it once, before they merge. What has moved already is left alone.
"""
from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Module below penstock.serve -> module below penstock. A package moves with all that is in it.
MODULES = {
    **{f"cli.{name}": f"cli.{name}" for name in (
        "main", "commands", "doctor", "models", "remote", "store", "combos", "proofs")},
    "client.llm": "llm.llm", "client.outputs": "llm.outputs",
    "client.client": "engine.client.client", "client.engines": "engine.client.replicas",
    "client.gate": "engine.client.gate", "client.generate": "engine.client.generation",
    "client.kept": "engine.client.supervised", "client.link": "engine.client.link",
    "http.local_pair": "engine.client.local_pd", "metrics": "engine.client.metrics",
    "metric_help": "engine.client.metric_help",
    "engine.fair": "engine.fair", "engine.live": "engine.request", "engine.loop": "engine.loop",
    "engine.main": "engine.process", "engine.open_pair": "engine.pd.open", "engine.paired": "engine.pd.router",
    "engine.peer": "engine.pd.remote", "engine.rooms": "engine.pd.rendezvous", "engine.record": "engine.record",
    "engine.shown": "engine.shown", "engine.storing": "engine.storing", "engine.timers": "engine.timers",
    "wire": "engine.wire", "collector": "config.base.collector",
    "ignored": "config.request.ignored",
    "http.apis.anthropic": "api.apis.anthropic", "http.apis.responses": "api.apis.responses",
    "http.apis.sglang": "api.apis.generate", "http.apis.blocks": "api.apis.blocks",
    "http.app": "api.app", "http.completions": "api.completions",
    "http.fields.body": "api.protocol.body", "http.fields.structured": "api.protocol.structured",
    "http.fields.tools": "api.protocol.tools", "http.types": "api.protocol.openai",
    "http.format": "api.openai_format", "http.limits": "api.limits", "http.main": "api.server",
    "http.native": "api.native", "http.openapi": "api.openapi", "http.page": "api.page",
    "http.routed": "api.pd_router", "descriptors": "api.descriptors", "logs": "api.logs", "status": "api.status",
    "namespaces": "engine.client.namespaces",
    "grammars.check": "text.grammar.check", "grammars.process": "text.grammar.process",
    "grammars.vocabulary": "text.grammar.vocabulary",
    **{f"parsers.{name}": f"text.tools.{name}" for name in (
        "asked", "lark", "reasoning", "source", "table", "formats")},
    **{f"text.{name}": f"text.{name}" for name in (
        "chat", "chat_render", "detokenize", "encode_text", "encoder", "frames", "gguf_tokenizer", "helper",
        "model_text", "tokenizer", "turns", "prompts", "vocabulary")},
}
PACKAGES = {"cli": "cli", "client": "engine.client", "engine": "engine", "http.apis": "api.apis", "http": "api",
            "http.fields": "api.protocol", "grammars": "text.grammar", "parsers": "text.tools", "text": "text"}
FOLDERS = {"page": "api/page_files"}
SUFFIXES = {".py", ".md", ".toml", ".tsv", ".yml", ".yaml", ".sh", ".json", ""}
BEFORE = r"(?<![\w.])penstock\.serve\."
FROM = re.compile(r"^(?P<indent> *)from penstock\.serve(?P<package>[\w.]*) import "
                  r"(?P<names>\([^)]*\)|[^\n(]*)(?P<rest>)$", re.M)


def move() -> None:
    old, new = ROOT / "src/penstock/serve", ROOT / "src/penstock"
    if not old.exists():
        return
    pairs = [(old / folder, new / to) for folder, to in FOLDERS.items()]
    for module, to in MODULES.items():
        path = old / module.replace(".", "/")
        pairs.append((path, new / to.replace(".", "/")) if path.is_dir() else
                     (path.with_suffix(".py"), new / (to.replace(".", "/") + ".py")))
    for source, target in pairs:
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["git", "mv", "-k", source, target], check=True, cwd=ROOT)


def imports(match: re.Match[str]) -> str:
    """`from package import module, ...`: one line for each package that its modules are in now."""
    package = match["package"].lstrip(".")
    names = [n.strip() for n in match["names"].strip("()").replace("\n", " ").split(",") if n.strip()]
    lines: dict[str, list[str]] = {}
    for name in names:
        plain, _, alias = name.partition(" as ")
        module = MODULES.get(f"{package}.{plain}".lstrip("."))
        if module is None:
            return match[0]
        home, _, leaf = module.rpartition(".")
        lines.setdefault(home, []).append(leaf if leaf == (alias or plain) else f"{leaf} as {alias or plain}")
    return "\n".join(f"{match['indent']}from penstock.{home} import {', '.join(names)}"
                     for home, names in lines.items())


def rewritten(text: str) -> str:
    text = FROM.sub(imports, text)
    everything = MODULES | PACKAGES
    for old in sorted(everything, key=len, reverse=True):
        text = re.sub(BEFORE + re.escape(old) + r"(?!\w)", f"penstock.{everything[old]}", text)
        text = re.sub(r'"serve\.' + re.escape(old) + '"', f'"{everything[old]}"', text)
    for old, new in sorted(MODULES.items(), key=lambda item: -len(item[0])):
        path, to = old.replace(".", "/"), new.replace(".", "/")
        text = re.sub(rf"(?<![\w-])serve/{path}(?=\.py|/)", to, text)
    for old, new in sorted(PACKAGES.items(), key=lambda item: -len(item[0])):
        text = re.sub(rf"(?<![\w-])serve/{old.replace('.', '/')}(?=/)", new.replace(".", "/"), text)
    return text.replace("serve/page/", "api/page_files/")


def main() -> None:
    move()
    files = subprocess.run(["git", "ls-files", "-z"], check=True, cwd=ROOT, capture_output=True, text=True).stdout
    for name in filter(None, files.split("\0")):
        path = ROOT / name
        if path.suffix not in SUFFIXES or name.startswith(("lab/", "tools/", "CHANGELOG")) or not path.is_file():
            continue
        try:
            text = path.read_text()
        except UnicodeDecodeError:
            continue
        if "serve" in text and (new := rewritten(text)) != text:
            path.write_text(new)


if __name__ == "__main__":
    main()

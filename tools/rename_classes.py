"""Rename public classes, and two methods, so that one name means one thing, in every Python file of the tree.

    python tools/rename_classes.py            rename, and print the files that changed

A class is renamed in its own module and where it is imported from there, by name or through its module. A branch
that was begun before the names changed runs this once before it merges. Running it twice changes nothing more.
"""
from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

RENAMED: dict[str, dict[str, str]] = {
    "penstock.engine.wire": {"Chunk": "OutputChunk", "Ready": "EngineReady", "Room": "BootstrapRoom",
                             "Asked": "RemotePrefill", "Logprob": "TokenLogprob"},
    "penstock.engine.process": {"Link": "ApiLink", "Engine": "EngineParts"},
    "penstock.engine.pd.router": {"Paired": "PdRouter"},
    "penstock.engine.pd.remote": {"Wait": "RemoteWait"},
    "penstock.engine.pd.rendezvous": {"Waiting": "RendezvousWait"},
    "penstock.engine.client.generation": {"Piece": "ChoicePiece"},
    "penstock.engine.client.metrics": {"Tokens": "TokenMetrics"},
    "penstock.engine.client.client": {"Stream": "ChoiceStream"},
    "penstock.text.tools.asked": {"Asked": "AnswerForm", "Offer": "ToolOffer"},
    "penstock.text.tools.source": {"Text": "TextItem", "Reader": "AnswerReader"},
    "penstock.text.tools.table": {"Format": "CallFormat"},
    "penstock.text.model_text": {"Text": "ModelText"},
    "penstock.text.encoder": {"Bound": "TokenBound"},
    "penstock.text.detokenize": {"Delta": "TextDelta"},
    "penstock.api.protocol.body": {"Sampled": "SamplingBody"},
    "penstock.api.apis.generate": {"Sampling": "GenerateSampling"},
    "penstock.api.apis.blocks": {"Scores": "BlockScores"},
    "penstock.api.apis.anthropic": {"Choice": "AnthropicToolChoice"},
    "penstock.api.apis.responses": {"TextFormat": "ResponseTextFormat"},
    "penstock.api.openai_format": {"Format": "AnswerFormat"},
    "penstock.cli.commands": {"Progress": "ProgressLine"},
    "penstock.memory.pool": {"Pool": "PagePool", "Part": "PoolPart"},
    "penstock.memory.across": {"Memory": "TensorMemory"},
    "penstock.memory.stores.mooncake": {"Mooncake": "MooncakeStore"},
    "penstock.replay.flight": {"Turn": "FlightTurn"},
    "penstock.replay.recorder": {"Turn": "RecordedTurn", "Recorded": "RecordedCore",
                                   "Flat": "OneTokenRetired", "brief": "without_columns"},
    "penstock.replay.redact": {"Leg": "RedactedTurn", "_Story": "_RequestHistory"},
    "penstock.transfer.layout": {"Piece": "PageSlice", "Progress": "GroupProgress",
                                 "rectangles": "common_layer_spans"},
    "penstock.transfer.events": {"Heard": "PeerMessage"},
    "penstock.transfer.codec": {"FrameReader": "SealedFrameReader"},
    "penstock.transfer.streams": {"Stream": "Connection"},
    "penstock.transfer.remote.shared": {"Shared": "SharedBuffer"},
    "penstock.transfer.handshake": {"Paired": "PeerSession"},
    "penstock.exec.drafts.drafter": {"Ask": "DraftQuery"},
    "penstock.exec.drafts.device": {"Lookup": "GpuNGram"},
    "penstock.exec.graphs.capture": {"Decodes": "DecodeAttention"},
    "penstock.exec.load.sizing": {"Room": "NodeMemory", "places": "num_peer_slots"},
    "penstock.exec.load.weights": {"Loaded": "LoadedModel"},
    "penstock.exec.pipeline.beats": {"Heard": "RankStatus"},
    "penstock.exec.pipeline.nodes": {"Beat": "NodeBeat", "Bytes": "NodeBytes", "Pools": "NodePools",
                                     "Stack": "NodeStack", "Started": "NodeStarted"},
    "penstock.exec.pipeline.process": {"Landed": "_StepEnded"},
    "penstock.exec.pipeline.remote_node": {"Node": "RemoteNode"},
    "penstock.exec.pipeline.wire": {"Beat": "RankBeat", "Memory": "RankMemory", "Refused": "StageRefused",
                                    "Met": "RendezvousKey"},
    "penstock.exec.sparse.prompts": {"Chunk": "PromptChunk"},
    "penstock.exec.start.workspace": {"Gauge": "MemoryProfile"},
    "penstock.exec.step.links": {"Heard": "TokensFromLast"},
    "penstock.core.kv.pages": {"Refused": "TrialRefused"},
    "penstock.core.policy.reclaim": {"Taken": "PlannedRows"},
    "penstock.engine.client.dialect": {"Usage": "CacheUsage"},
    "penstock.kernels.attention.paged_attention.native": {"Decodes": "NativeDecodes"},
    "penstock.kernels.attention.paged_attention.sdpa": {"Chunk": "SdpaChunk"},
    "penstock.kernels.attention.paged_attention.tiled": {"Chunk": "TiledChunk"},
    "penstock.kernels.fused.layer.reference": {"Reference": "LayerReference"},
    "penstock.kernels.fused.step": {"Place": "BlockTableRef"},
    "penstock.kernels.fused.step.spec": {"Place": "BlockTableRef"},
    "penstock.kernels.gemm.experts.reference": {"Reference": "ExpertsReference"},
    "penstock.kernels.gemm.linear.triton_rows": {"Cut": "TileShape"},
    "penstock.model.latent": {"LatentAttention": "LatentLayer"},
    "penstock.model.layers": {"AttentionSpec": "GqaSpec"},
    "penstock.sim.pair": {"Connection": "SimConnection"},
    "penstock.sim.shared": {"Engines": "SharedEngines"},
    "penstock.sim.store": {"Store": "SimStore"},
    "penstock.transfer.landing": {"Landed": "TransferResult", "Landings": "GrantTable", "_Landing": "_Generation"},
}
# Methods whose old name nothing else has, or that are called on this name only.
METHODS = ((r"\bhasten\b(?=\()", "start_now"), (r"(?<=mover\.)settle\b", "wait_for"))


def module_of(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[1:] if parts[0] == "src" else parts).removesuffix(".__init__")


def names_in(path: Path, tree: ast.Module) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """Return old -> new of the names that the file has, and the same by the dotted name of a module."""
    own = dict(RENAMED.get(module_of(path), {}))
    through: dict[str, dict[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            table = RENAMED.get(node.module, {})
            own |= {a.name: table[a.name] for a in node.names if a.name in table}
            for a in node.names:
                if found := RENAMED.get(f"{node.module}.{a.name}"):
                    through[a.asname or a.name] = found
        elif isinstance(node, ast.Import):
            for a in node.names:
                if found := RENAMED.get(a.name):
                    through[a.asname or a.name] = found
    return own, through


def edits(text: str, own: dict[str, str], through: dict[str, dict[str, str]]) -> Iterator[tuple[int, int, int, str]]:
    """Yield (line, first column, end column, new text) of each token that changes."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for i, token in enumerate(tokens):
        line, column = token.start
        if token.type == tokenize.NAME:
            before = tokens[i - 1].string if i else ""
            owner = tokens[i - 2].string if before == "." and i > 1 else ""
            new = through.get(owner, {}).get(token.string) if before == "." else own.get(token.string)
            keyword = i + 1 < len(tokens) and tokens[i + 1].string == "=" and before in ("(", ",")
            if new and not keyword:
                yield line, column, token.end[1], new
        elif token.type in (tokenize.STRING, tokenize.COMMENT) or token.type == getattr(tokenize, "FSTRING_MIDDLE", -1):
            for row, part in enumerate(token.string.split("\n")):
                start = column if row == 0 else 0
                quoted = "" if "TypeAlias" in token.line else "(?<=`)"
                for found in re.finditer(rf"{quoted}(?:(\w+)\.)?\b(\w+)\b", part):
                    table = through.get(found[1], {}) if found[1] else own
                    if found[2] in table:
                        yield line + row, start + found.start(2), start + found.end(2), table[found[2]]


def renamed(path: Path, text: str) -> str:
    own, through = names_in(path, ast.parse(text))
    if not own and not through:
        return text
    lines = text.split("\n")
    for line, start, end, new in sorted(set(edits(text, own, through)), reverse=True):
        row = lines[line - 1]
        lines[line - 1] = row[:start] + new + row[end:]
    return "\n".join(lines)


def main() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True).stdout
    for path in map(Path, listed.split()):
        if path == Path("tools/rename_classes.py") or path.parts[0] == "lab":
            continue
        text = path.read_text()
        new = renamed(path, text)
        for pattern, name in METHODS:
            new = re.sub(pattern, name, new)
        if new != text:
            path.write_text(new)
            print(path)


if __name__ == "__main__":
    main()

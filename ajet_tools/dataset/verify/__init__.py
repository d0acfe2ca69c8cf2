"""Verifies the reference answers of rows; `open_verifier` opens a verifier by its spec.

    none               every row passes
    agreement:K        a majority of K independent answers of the endpoint must equal the row's answer
    judge:FILE:NAME    the user's `@ajet.judge` gives the row's answer full marks
    judge:FILE:NAME:K  the judge gives a majority of K independent answers of the endpoint full marks
    code               a sandboxed program: the row's tests, its own program, or one that the endpoint writes
    llm, llm:FILE      a model grades the answer by a rubric, built-in or from a file

    A,B                both must pass; B is skipped if A refuses

A refusal's `reason` is one of a few phrases, so refusals can be counted; `details` has the
evidence. `failed` means that the check itself failed (the judge raised, the grader's reply was
invalid); such a row is refused too. Errors of the endpoint and a spent budget are raised.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from ajet_sdk.config.objects import load_object
from ajet_sdk.engines.client import ModelClient
from ajet_sdk.errors import ConfigError
from ajet_sdk.sandbox.fence import fenced
from ajet_tools.dataset.verify.agreement import AgreementVerifier
from ajet_tools.dataset.verify.combined import (
    CombinedVerifier,
    VerifierPart,
    Verify,
    split_spec,
)
from ajet_tools.dataset.verify.judge import JudgeVerifier, LlmVerifier
from ajet_tools.dataset.verify.program import ProgramVerifier
from ajet_tools.dataset.verify.verdict import Verifier

VERIFIERS = ("agreement:K", "judge:FILE:NAME", "code", "llm", "none")


def open_verification(
    verify: str | Verify, writer: ModelClient, *, seed: int = 0
) -> CombinedVerifier | None:
    """Opens the verifier of a run with its model; None if nothing is checked.

    Raises as `open_verifier`, and ConfigError for a model that is not asked.
    """
    verify = Verify.of(verify)
    opened = open_verifier(verify.spec, seed=seed, unfenced=verify.unfenced)
    asking = [part for part in opened.parts if part.verifier.calls]
    if verify.model is not None and not asking:
        raise ConfigError(f"--verify-model {verify.model}: --verify {verify.spec} asks no model")
    if asking:
        endpoint = verify.endpoint(writer)
        for part in asking:
            part.endpoint = endpoint.counted_apart()
    return opened if opened.parts else None


def open_verifier(spec: str, *, seed: int = 0, unfenced: bool = False) -> CombinedVerifier:
    """Opens the verifier of a spec; the default K of `agreement` is 3.

    Args:
        spec: a spec in the syntax of this module.
        seed: of requests to the endpoint.
        unfenced: run programs without a sandbox.

    Raises ConfigError for an invalid spec, a missing file, a judge that cannot be imported, and for
    `code` without a sandbox, unless `unfenced`; SignatureError for a judge with unsupported
    parameters.
    """
    opened = [_open_one(part, seed, unfenced) for part in split_spec(spec)]
    if opened == [None]:
        return CombinedVerifier("none", [])
    verifiers = [verifier for verifier in opened if verifier is not None]
    if len(verifiers) < len(opened):
        raise ConfigError(f"--verify {spec}: `none` cannot be combined")
    name = verifiers[0].name if len(verifiers) == 1 else spec.strip()
    return CombinedVerifier(name, [VerifierPart(verifier) for verifier in verifiers])


def _open_one(spec: str, seed: int, unfenced: bool) -> Verifier | None:
    kind, _, argument = spec.strip().partition(":")
    if kind == "none" and not argument:
        return None
    if kind == "agreement":
        return AgreementVerifier(_count(argument or "3", spec), seed)
    if kind == "judge" and argument:
        return _judge(argument, spec, seed)
    if kind == "code" and not argument:
        return ProgramVerifier(seed=seed, unfenced=not fenced("--verify code", unfenced=unfenced))
    if kind == "llm":
        return LlmVerifier(spec.strip(), _rubric(argument, spec) if argument else None)
    near = difflib.get_close_matches(
        kind, [known_kind.partition(":")[0] for known_kind in VERIFIERS], n=1
    )
    if near and near[0] != kind:
        hint = f"did you mean {near[0]}? There"
    else:
        hint = "there"
    raise ConfigError(f"--verify {spec!r} is unknown; {hint} are {', '.join(VERIFIERS)}")


def _count(text: str, spec: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise ConfigError(
            f"--verify {spec}: the number of independent answers must be 1 to 64 (got {text!r})"
        )
    return int(text)


def _judge(rest: str, spec: str, seed: int) -> Verifier:
    path, _, last = rest.rpartition(":")
    k = _count(last, spec) if path and last.isdecimal() else 0
    path = path if k else rest
    if ":" not in path and "->" not in path:
        raise ConfigError(
            f"--verify {spec}: a judge has the form judge:FILE:NAME, such as judge:agent.py:exact"
        )
    judge = load_object(path, Path.cwd())
    if isinstance(judge, type):
        raise ConfigError(f"--verify {spec}: {path} is a class; name a function with @ajet.judge")
    return JudgeVerifier(judge, spec.strip(), k=k, seed=seed)


def _rubric(name: str, spec: str) -> str:
    path = Path(name).expanduser()
    try:
        text = path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--verify {spec}: {path} is not UTF-8 ({error.reason} at byte {error.start})"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"--verify {spec}: cannot read the rubric {path}: {error.strerror or error}"
        ) from None
    if not text:
        raise ConfigError(f"--verify {spec}: the rubric {path} is empty")
    return text

"""Requests to Gemini's API as chat completions. Google takes names in snake_case and in camelCase."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ajet_sdk.dialects.fields import Field, Fields, fields, refuse
from ajet_sdk.dialects.json import joined, json_text
from ajet_sdk.errors import RequestRefused

GEMINI_FIELDS: Fields = {
    **fields("honoured", "contents systemInstruction", "text, functionCall, functionResponse, thought"),
    **fields("honoured", "model", "the model is named in the path"),
    **fields("honoured", "tools", "functionDeclarations only; tools that Google runs are refused by name"),
    **fields("honoured", "toolConfig", "functionCallingConfig: mode, allowedFunctionNames"),
    **fields("honoured", "generationConfig", "see below"),
    **fields("no effect", "labels serviceTier store outputConfig"),
    **fields("no effect", "safetySettings modelArmorConfig", "there is no filtering"),
    "continuationToken": Field("refused", "send the whole conversation; a reply that is cut ends with MAX_TOKENS"),
    "cachedContent": Field(
        "refused", "send the whole conversation; repeated prefixes are computed once in any case", ("",)
    ),
}
"""Every field of a request, in camelCase; snake_case is read alike."""

SAMPLING = {
    "temperature": "temperature",
    "topP": "top_p",
    "topK": "top_k",
    "maxOutputTokens": "max_tokens",
    "stopSequences": "stop",
    "seed": "seed",
    "candidateCount": "n",
    "presencePenalty": "presence_penalty",
    "frequencyPenalty": "frequency_penalty",
    "responseLogprobs": "logprobs",
    "logprobs": "top_logprobs",
}
"""Of generationConfig: what has another name only."""

CONFIG_FIELDS: Fields = {
    **fields("honoured", " ".join(SAMPLING)),
    **fields("honoured", "responseMimeType", "text/plain, application/json, text/x.enum"),
    **fields("honoured", "responseSchema responseJsonSchema", "with responseMimeType application/json"),
    **fields(
        "honoured", "thinkingConfig", "thinkingBudget (0 or more) and thinkingLevel are passed to the chat template"
    ),
    **fields("no effect", "mediaResolution audioTimestamp audioTranscriptionConfig enableEnhancedCivicAnswers"),
    **fields("no effect", "routingConfig modelConfig modelSelectionConfig", "the policy answers"),
    "enableAffectiveDialog": Field("refused", "say in the systemInstruction how to answer", (False,)),
    "translationConfig": Field("refused", "ask for a translation in the contents"),
    "responseFormat": Field("refused", "use responseMimeType and responseJsonSchema", ([],)),
    "responseModalities": Field("refused", "the policy produces text only", (["TEXT"], ["MODALITY_UNSPECIFIED"], [])),
    "speechConfig": Field("refused", "the policy produces text only"),
    "imageConfig": Field("refused", "the policy produces no images"),
}
"""Every field of generationConfig."""

SIGNED = b"ajet:"
"""How a thoughtSignature of ours begins; the reasoning follows, so that a client that is not shown it sends it back."""


def read(body: Mapping[str, Any], model: str, method: str) -> dict[str, Any]:
    """The body of a chat completion. Raises RequestRefused."""
    given = camel(body, "the request")
    if method == "countTokens" and "generateContentRequest" in given:
        given = camel(given["generateContentRequest"], "generateContentRequest")
    refuse(given, GEMINI_FIELDS)
    asked: dict[str, Any] = {"model": model, "messages": list(_messages(given))}
    if method == "streamGenerateContent":
        asked["stream"] = True
    tools = [function for tool in _list(given, "tools") for function in _functions(tool)]
    if tools:
        asked["tools"] = tools
    asked.update(_tool_choice(camel(given.get("toolConfig") or {}, "toolConfig")))
    asked.update(_config(camel(given.get("generationConfig") or {}, "generationConfig")))
    if asked["messages"][-1]["role"] == "assistant":
        asked.update(continue_final_message=True, add_generation_prompt=False)
    return asked


def shows_thoughts(body: Mapping[str, Any]) -> bool:
    """Whether a request asks to see the reasoning."""
    config = camel(camel(body, "the request").get("generationConfig") or {}, "generationConfig")
    return bool(camel(config.get("thinkingConfig") or {}, "thinkingConfig").get("includeThoughts"))


def _list(holder: Mapping[str, Any], name: str) -> list[Any]:
    """A repeated field; one that is given alone is a list of one."""
    value = holder.get(name)
    return [] if value is None else value if isinstance(value, list) else [value]


def _messages(given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if not given.get("contents"):
        raise RequestRefused("contents is not specified", "contents")
    system = given.get("systemInstruction")
    if system:
        parts = [system] if isinstance(system, str) else _list(camel(system, "systemInstruction"), "parts")
        said = [part if isinstance(part, str) else _text(camel(part, "systemInstruction.parts")) for part in parts]
        yield {"role": "system", "content": "\n".join(said)}
    waiting = list[tuple[str, str]]()
    """Id and name of the calls that have no answer yet, for an answer may go without its id."""
    for index, one in enumerate(_list(given, "contents")):
        where = f"contents[{index}]"
        content = camel({"parts": one} if isinstance(one, str) else one, where)
        if content.get("role") not in (None, "user", "model", "function"):
            raise RequestRefused(f"{where}.role must be user or model (got {content['role']!r})", "contents")
        read_parts = [
            camel({"text": p} if isinstance(p, str) else p, f"{where}.parts") for p in _list(content, "parts")
        ]
        if content.get("role") == "model":
            message = _assistant(read_parts, where, index)
            waiting += [(call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())]
            yield message
        else:
            yield from _user(read_parts, where, waiting)


def _text(part: Mapping[str, Any]) -> str:
    if not isinstance(part.get("text"), str):
        raise RequestRefused(
            f"a part with {', '.join(sorted(part)) or 'no fields'} is not supported; send text", "contents"
        )
    return str(part["text"])


def _assistant(parts: list[dict[str, Any]], where: str, index: int) -> dict[str, Any]:
    texts, thoughts, signed = list[str](), list[str](), list[str]()
    calls = list[dict[str, Any]]()
    for part in parts:
        signed += _of_signature(part.get("thoughtSignature"))
        if "functionCall" in part:
            call = camel(part["functionCall"], f"{where}.functionCall")
            if not isinstance(call.get("name"), str):
                raise RequestRefused(f"{where}: functionCall.name is missing", "contents")
            function = {"name": call["name"], "arguments": json_text(call.get("args") or {})}
            known = call.get("id") or f"c{index:05d}{len(calls):03d}"
            calls.append({"id": known, "type": "function", "function": function})
        elif set(part) - {"thoughtSignature"}:
            (thoughts if part.get("thought") else texts).append(_text(part))
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    reasoning = "".join(thoughts) or "".join(signed)
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _user(parts: list[dict[str, Any]], where: str, waiting: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    said = list[dict[str, Any]]()
    for part in parts:
        if "functionResponse" not in part:
            said.append(_said(part))
            continue
        if said:
            yield {"role": "user", "content": joined(said)}
            said = []
        given = camel(part["functionResponse"], f"{where}.functionResponse")
        name, known = given.get("name"), given.get("id")
        found = next((call for call in waiting if known == call[0] or (not known and name == call[1])), None)
        if found is None and not known:
            raise RequestRefused(f"{where}: there is no open call of {name!r} for this functionResponse", "contents")
        if found is not None:
            waiting.remove(found)
        yield {"role": "tool", "tool_call_id": known or (found or ("",))[0], "content": _result(given.get("response"))}
    if said or not parts:
        yield {"role": "user", "content": joined(said)}


def _said(part: Mapping[str, Any]) -> dict[str, Any]:
    if "inlineData" in part:
        data = camel(part["inlineData"], "inlineData")
        if str(data.get("mimeType")).startswith("image/"):
            return {"type": "image_url", "image_url": {"url": f"data:{data['mimeType']};base64,{data.get('data')}"}}
    return {"type": "text", "text": _text(part)}


def _result(response: Any) -> str:
    """What a tool said: the value of `result` or `output` where that is all, else the object as JSON."""
    if isinstance(response, dict) and len(response) == 1:
        ((name, value),) = response.items()
        if name in ("result", "output", "error"):
            said = value if isinstance(value, str) else json_text(value)
            return f"Error: {said}" if name == "error" and not said.lower().startswith("error") else said
    return json_text(response or {})


def _functions(tool: Any) -> Iterator[dict[str, Any]]:
    given = camel(tool, "tools")
    other = [name for name, value in given.items() if name != "functionDeclarations" and value is not None]
    if other:
        raise RequestRefused(
            f"tools: {other[0]} runs on Google's servers; declare your own function in functionDeclarations",
            "tools",
        )
    for one in _list(given, "functionDeclarations"):
        declared = camel(one, "functionDeclarations")
        if not isinstance(declared.get("name"), str):
            raise RequestRefused("tools: every function declaration needs a name", "tools")
        function: dict[str, Any] = {"name": declared["name"]}
        if declared.get("description") is not None:
            function["description"] = declared["description"]
        own = declared.get("parametersJsonSchema")
        if own is None and declared.get("parameters") is not None:
            own = json_schema(declared["parameters"])
        function["parameters"] = {"type": "object", "properties": {}} if own is None else own
        yield {"type": "function", "function": function}


def _tool_choice(config: Mapping[str, Any]) -> dict[str, Any]:
    calling = camel(config.get("functionCallingConfig") or {}, "functionCallingConfig")
    mode = str(calling.get("mode") or "AUTO").upper()
    names = _list(calling, "allowedFunctionNames")
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise RequestRefused(
            f"functionCallingConfig.mode must be AUTO, ANY, NONE or VALIDATED (got {mode})", "toolConfig"
        )
    if names and mode in ("ANY", "VALIDATED"):
        functions = [{"type": "function", "function": {"name": name}} for name in names]
        if mode == "ANY" and len(names) == 1:
            return {"tool_choice": functions[0]}
        allowed = {"mode": "required" if mode == "ANY" else "auto", "tools": functions}
        return {"tool_choice": {"type": "allowed_tools", "allowed_tools": allowed}}
    if not calling.get("mode"):
        return {}
    return {"tool_choice": {"ANY": "required", "NONE": "none"}.get(mode, "auto")}


def _config(config: Mapping[str, Any]) -> dict[str, Any]:
    asked = dict[str, Any]()
    refuse(config, CONFIG_FIELDS)
    for name, value in config.items():
        if name in SAMPLING and value is not None and value is not False and value != []:
            asked[SAMPLING[name]] = value
    if "top_logprobs" in asked:
        asked.setdefault("logprobs", True)
    thinking = camel(config.get("thinkingConfig") or {}, "thinkingConfig")
    budget, level = thinking.get("thinkingBudget"), thinking.get("thinkingLevel")
    if budget is not None and budget >= 0:
        asked["chat_template_kwargs"] = {"enable_thinking": budget > 0}
    if level and not str(level).upper().endswith("UNSPECIFIED"):
        asked["reasoning_effort"] = str(level).lower()
    return {**asked, **_response_format(config)}


def _response_format(config: Mapping[str, Any]) -> dict[str, Any]:
    kind = config.get("responseMimeType") or "text/plain"
    schema = config.get("responseJsonSchema")
    if schema is None and config.get("responseSchema") is not None:
        schema = json_schema(config["responseSchema"])
    if kind not in ("text/plain", "application/json", "text/x.enum"):
        raise RequestRefused(f"responseMimeType {kind!r} is not supported; use application/json", "responseMimeType")
    if schema is not None and kind != "text/plain":
        if kind == "text/x.enum":  # the bare value, without quotes
            return {"structured_outputs": {"choice": list(schema.get("enum", ()))}}
        named = {"name": "output", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if schema is not None:
        raise RequestRefused("a response schema needs responseMimeType application/json", "responseMimeType")
    return {"response_format": {"type": "json_object"}} if kind == "application/json" else {}


def _of_signature(value: Any) -> list[str]:
    """The reasoning in a signature of ours; nothing in another's."""
    try:
        said = base64.b64decode(re.sub(r"\s", "", str(value or "")).translate(_URL_SAFE))
    except (binascii.Error, ValueError):
        return []
    return [said[len(SIGNED) :].decode("utf-8", "replace")] if said.startswith(SIGNED) else []


_URL_SAFE = str.maketrans("-_", "+/")


_WHOLE = frozenset(("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"))
"""Numbers of 64 bits, which Google's JSON spells as strings."""
_SCHEMAS = {"defs": "$defs", "$defs": "$defs", "properties": "properties"}
_DROPPED = frozenset(("example", "propertyOrdering", "nullable"))


def camel(value: Any, where: str) -> dict[str, Any]:
    """An object with its names in camelCase: Google takes both. Raises RequestRefused where it is no object."""
    if not isinstance(value, Mapping):
        raise RequestRefused(f"{where} must be an object (got {value!r:.100})", where)
    return {_camel(name): one for name, one in value.items()}


def _camel(name: str) -> str:
    return re.sub(r"_([a-z])", lambda found: found.group(1).upper(), name)


def json_schema(schema: Any) -> dict[str, Any]:
    """A JSON schema of one of Google's: types in upper case, `nullable`, numbers as strings.

    Names stand in the order they were given in, properties in that of `propertyOrdering`.
    """
    given = camel(schema, "a schema")
    found = dict[str, Any]()
    for name, value in given.items():
        if value is None or name in _DROPPED:
            continue
        if name == "type":
            kinds = [str(one).lower() for one in (value if isinstance(value, list) else [value])]
            if kinds != ["type_unspecified"]:
                found["type"] = kinds if len(kinds) > 1 else kinds[0]
        elif name in _SCHEMAS:
            named = value if isinstance(value, Mapping) else {}
            order = [one for one in given.get("propertyOrdering") or () if one in named]
            found[_SCHEMAS[name]] = {one: json_schema(named[one]) for one in dict.fromkeys([*order, *named])}
        elif name == "anyOf":
            found[name] = [json_schema(one) for one in value]
        elif name in ("items", "additionalProperties"):
            found[name] = json_schema(value) if isinstance(value, Mapping) else value
        elif name in _WHOLE:
            found[name] = int(value)
        else:
            found["$ref" if name == "ref" else name] = value
    if given.get("nullable"):
        return _nullable(found)
    return found


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema.get("type")
    if kinds is None:
        return schema
    found = {**schema, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
    if "enum" in schema:
        found["enum"] = [*schema["enum"], None]
    return found

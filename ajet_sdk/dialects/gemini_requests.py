"""Converts requests of Gemini's API to chat completions. Google accepts names in snake_case and
camelCase."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping

from ajet_sdk.dialects.fields import Field, Fields, camel_case, fields, refuse
from ajet_sdk.dialects.json import assistant, data_url, joined, json_text
from ajet_sdk.errors import RequestRefused
from ajet_sdk.types import Json, JsonView

GEMINI_FIELDS: Fields = {
    **fields(
        "honoured", "contents systemInstruction", "text, functionCall, functionResponse, thought"
    ),
    **fields("honoured", "model", "the model is named in the path"),
    **fields(
        "honoured", "tools", "functionDeclarations only; tools that Google runs are refused by name"
    ),
    **fields("honoured", "toolConfig", "functionCallingConfig: mode, allowedFunctionNames"),
    **fields("honoured", "generationConfig", "see below"),
    **fields("no effect", "labels serviceTier store outputConfig"),
    **fields("no effect", "safetySettings modelArmorConfig", "there is no filtering"),
    "continuationToken": Field(
        "refused", "send the whole conversation; a reply that is cut ends with MAX_TOKENS"
    ),
    "cachedContent": Field(
        "refused",
        "send the whole conversation; repeated prefixes are computed once in any case",
        ("",),
    ),
}
"""Every field of a request in camelCase; snake_case is accepted too."""

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
"""Fields of generationConfig that only need another name."""

CONFIG_FIELDS: Fields = {
    **fields("honoured", " ".join(SAMPLING)),
    **fields("honoured", "responseMimeType", "text/plain, application/json, text/x.enum"),
    **fields(
        "honoured", "responseSchema responseJsonSchema", "with responseMimeType application/json"
    ),
    **fields(
        "honoured",
        "thinkingConfig",
        "thinkingBudget (0 or more) and thinkingLevel are passed to the chat template",
    ),
    **fields(
        "no effect",
        "mediaResolution audioTimestamp audioTranscriptionConfig enableEnhancedCivicAnswers",
    ),
    **fields("no effect", "routingConfig modelConfig modelSelectionConfig", "the policy answers"),
    "enableAffectiveDialog": Field(
        "refused", "say in the systemInstruction how to answer", (False,)
    ),
    "translationConfig": Field("refused", "ask for a translation in the contents"),
    "responseFormat": Field("refused", "use responseMimeType and responseJsonSchema", ([],)),
    "responseModalities": Field(
        "refused", "the policy produces text only", (["TEXT"], ["MODALITY_UNSPECIFIED"], [])
    ),
    "speechConfig": Field("refused", "the policy produces text only"),
    "imageConfig": Field("refused", "the policy produces no images"),
}
"""Every field of generationConfig."""

CALL_FIELDS: Fields = {
    **fields("honoured", "id name args"),
    "partialArgs": Field("refused", "send the complete args", ([],)),
    "willContinue": Field("refused", "send the complete args in one functionCall", (False,)),
}
"""Every field of a functionCall."""

RESPONSE_FIELDS: Fields = {
    **fields("honoured", "id name response"),
    **fields("honoured", "parts", "images as inlineData"),
    "willContinue": Field(
        "refused", "collect the results of a call, and send them as one functionResponse", (False,)
    ),
    "scheduling": Field("refused", "it is for the Live API", ("SCHEDULING_UNSPECIFIED",)),
}
"""Every field of a functionResponse."""

SIGNED = b"ajet:"
"""Prefix of the thoughtSignatures made here, followed by the reasoning, which clients send back
without showing it."""


def read(body: Mapping[str, object], model: str, method: str) -> Json:
    """Convert a request to the body of a chat completion. Raises RequestRefused."""
    request = camel(body, "the request")
    if method == "countTokens" and "generateContentRequest" in request:
        request = camel(request["generateContentRequest"], "generateContentRequest")
    refuse(request, GEMINI_FIELDS)
    chat: Json = {"model": model, "messages": list(_messages(request))}
    if method == "streamGenerateContent":
        chat["stream"] = True
    tools = [function for tool in _list(request, "tools") for function in _functions(tool)]
    if tools:
        chat["tools"] = tools
    chat.update(_tool_choice(camel(request.get("toolConfig") or {}, "toolConfig")))
    chat.update(_config(camel(request.get("generationConfig") or {}, "generationConfig")))
    if chat["messages"][-1]["role"] == "assistant":
        chat.update(continue_final_message=True, add_generation_prompt=False)
    return chat


def shows_thoughts(body: Mapping[str, object]) -> bool:
    config = camel(camel(body, "the request").get("generationConfig") or {}, "generationConfig")
    return bool(camel(config.get("thinkingConfig") or {}, "thinkingConfig").get("includeThoughts"))


def _list(holder: Mapping[str, object], name: str) -> list[object]:
    """The value of a repeated field; a single value becomes a list."""
    value = holder.get(name)
    return [] if value is None else value if isinstance(value, list) else [value]


def _messages(request: Mapping[str, object]) -> Iterator[Json]:
    if not request.get("contents"):
        raise RequestRefused("contents is not specified", "contents")
    system = request.get("systemInstruction")
    if system:
        parts = (
            [system]
            if isinstance(system, str)
            else _list(camel(system, "systemInstruction"), "parts")
        )
        texts = [
            part if isinstance(part, str) else _text(camel(part, "systemInstruction.parts"))
            for part in parts
        ]
        yield {"role": "system", "content": "\n".join(texts)}
    waiting = list[tuple[str, str]]()
    """Id and name of unanswered calls: an answer may lack its id."""
    for index, value in enumerate(_list(request, "contents")):
        where = f"contents[{index}]"
        content = camel({"parts": value} if isinstance(value, str) else value, where)
        if content.get("role") not in (None, "user", "model", "function"):
            raise RequestRefused(
                f"{where}.role must be user or model (got {content['role']!r})", "contents"
            )
        read_parts = [
            camel({"text": p} if isinstance(p, str) else p, f"{where}.parts")
            for p in _list(content, "parts")
        ]
        if content.get("role") == "model":
            message = _assistant(read_parts, where, index)
            waiting += [
                (call["id"], call["function"]["name"]) for call in message.get("tool_calls", ())
            ]
            yield message
        else:
            yield from _user(read_parts, where, waiting)


def _text(part: Json) -> str:
    if not isinstance(part.get("text"), str):
        raise RequestRefused(
            f"a part with {', '.join(sorted(part)) or 'no fields'} is not supported; send text",
            "contents",
        )
    return str(part["text"])


def _assistant(parts: list[Json], where: str, index: int) -> Json:
    texts = list[str]()
    thoughts = list[str]()
    signed = list[str]()
    calls = list[Json]()
    for part in parts:
        signed += _of_signature(part.get("thoughtSignature"))
        if "functionCall" in part:
            call = camel(part["functionCall"], f"{where}.functionCall")
            refuse(call, CALL_FIELDS)
            if not isinstance(call.get("name"), str):
                raise RequestRefused(f"{where}: functionCall.name is missing", "contents")
            function = {"name": call["name"], "arguments": json_text(call.get("args") or {})}
            known = call.get("id") or f"c{index:05d}{len(calls):03d}"
            calls.append({"id": known, "type": "function", "function": function})
        elif set(part) - {"thoughtSignature"}:
            (thoughts if part.get("thought") else texts).append(_text(part))
    return assistant(texts, "".join(thoughts) or "".join(signed), calls)


def _user(parts: list[Json], where: str, waiting: list[tuple[str, str]]) -> Iterator[Json]:
    content = list[Json]()
    for part in parts:
        if "functionResponse" not in part:
            content.append(_content_part(part))
            continue
        if content:
            yield {"role": "user", "content": joined(content)}
            content = []
        response = camel(part["functionResponse"], f"{where}.functionResponse")
        refuse(response, RESPONSE_FIELDS)
        name = response.get("name")
        known = response.get("id")
        answered = next(
            (call for call in waiting if known == call[0] or (not known and name == call[1])), None
        )
        if answered is None and not known:
            raise RequestRefused(
                f"{where}: there is no open call of {name!r} for this functionResponse", "contents"
            )
        if answered is not None:
            waiting.remove(answered)
        yield {
            "role": "tool",
            "tool_call_id": known or (answered or ("",))[0],
            "content": _result_content(response, f"{where}.functionResponse"),
        }
    if content or not parts:
        yield {"role": "user", "content": joined(content)}


def _result_content(response: Json, where: str) -> object:
    """The content of a tool's result: its text, followed by its images."""
    text = _result(response.get("response"))
    media = [_content_part(camel(part, f"{where}.parts")) for part in _list(response, "parts")]
    return joined([{"type": "text", "text": text}, *media]) if media else text


def _content_part(part: Json) -> Json:
    if "inlineData" in part:
        data = camel(part["inlineData"], "inlineData")
        if str(data.get("mimeType")).startswith("image/"):
            return {
                "type": "image_url",
                "image_url": {"url": data_url(data["mimeType"], data.get("data"))},
            }
    if "fileData" in part:
        link = camel(part["fileData"], "fileData")
        if str(link.get("mimeType")).startswith("image/"):
            return {"type": "image_url", "image_url": {"url": str(link.get("fileUri"))}}
    return {"type": "text", "text": _text(part)}


def _result(response: object) -> str:
    """The text of a tool's result: `result` or `output` if it is the only field, else the object as
    JSON."""
    if isinstance(response, dict) and len(response) == 1:
        ((name, value),) = response.items()
        if name in ("result", "output", "error"):
            text = value if isinstance(value, str) else json_text(value)
            if name == "error" and not text.lower().startswith("error"):
                return f"Error: {text}"
            return text
    return json_text(response or {})


def _functions(tool: object) -> Iterator[Json]:
    entry = camel(tool, "tools")
    server_tools = [
        name
        for name, value in entry.items()
        if name != "functionDeclarations" and value is not None
    ]
    if server_tools:
        raise RequestRefused(
            f"tools: {server_tools[0]} runs on Google's servers; declare your own function in"
            " functionDeclarations",
            "tools",
        )
    for declaration in _list(entry, "functionDeclarations"):
        declared = camel(declaration, "functionDeclarations")
        if not isinstance(declared.get("name"), str):
            raise RequestRefused("tools: every function declaration needs a name", "tools")
        function: Json = {"name": declared["name"]}
        if declared.get("description") is not None:
            function["description"] = declared["description"]
        parameters = declared.get("parametersJsonSchema")
        if parameters is None and declared.get("parameters") is not None:
            parameters = json_schema(declared["parameters"])
        function["parameters"] = (
            {"type": "object", "properties": {}} if parameters is None else parameters
        )
        yield {"type": "function", "function": function}


def _tool_choice(config: Mapping[str, object]) -> Json:
    calling = camel(config.get("functionCallingConfig") or {}, "functionCallingConfig")
    mode = str(calling.get("mode") or "AUTO").upper()
    names = _list(calling, "allowedFunctionNames")
    if mode not in ("AUTO", "ANY", "NONE", "VALIDATED", "MODE_UNSPECIFIED"):
        raise RequestRefused(
            f"functionCallingConfig.mode must be AUTO, ANY, NONE or VALIDATED (got {mode})",
            "toolConfig",
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


def _config(config: JsonView) -> Json:
    options = Json()
    refuse(config, CONFIG_FIELDS)
    for name, value in config.items():
        if name in SAMPLING and value is not None and value is not False and value != []:
            options[SAMPLING[name]] = value
    if "top_logprobs" in options:
        options.setdefault("logprobs", True)
    thinking = camel(config.get("thinkingConfig") or {}, "thinkingConfig")
    budget = thinking.get("thinkingBudget")
    level = thinking.get("thinkingLevel")
    if budget is not None and budget >= 0:
        options["chat_template_kwargs"] = {"enable_thinking": budget > 0}
    if level and not str(level).upper().endswith("UNSPECIFIED"):
        options["reasoning_effort"] = str(level).lower()
    return {**options, **_response_format(config)}


def _response_format(config: JsonView) -> Json:
    kind = config.get("responseMimeType") or "text/plain"
    schema = config.get("responseJsonSchema")
    if schema is None and config.get("responseSchema") is not None:
        schema = json_schema(config["responseSchema"])
    if kind not in ("text/plain", "application/json", "text/x.enum"):
        raise RequestRefused(
            f"responseMimeType {kind!r} is not supported; use application/json", "responseMimeType"
        )
    if schema is not None and kind != "text/plain":
        if kind == "text/x.enum":  # the bare value, without quotes
            return {"structured_outputs": {"choice": list(schema.get("enum", ()))}}
        named = {"name": "output", "schema": schema, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": named}}
    if schema is not None:
        raise RequestRefused(
            "a response schema needs responseMimeType application/json", "responseMimeType"
        )
    if kind == "application/json":
        return {"response_format": {"type": "json_object"}}
    return {}


def _of_signature(value: object) -> list[str]:
    """The reasoning in a signature made here; empty for others."""
    try:
        data = base64.b64decode(re.sub(r"\s", "", str(value or "")).translate(_URL_SAFE))
    except (binascii.Error, ValueError):
        return []
    if data.startswith(SIGNED):
        return [data[len(SIGNED) :].decode("utf-8", "replace")]
    return []


_URL_SAFE = str.maketrans("-_", "+/")


_WHOLE = frozenset(
    ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
)
"""64-bit numbers, which Google's JSON writes as strings."""
_SCHEMAS = {"defs": "$defs", "$defs": "$defs", "properties": "properties"}
_DROPPED = frozenset(("example", "propertyOrdering", "nullable"))


def camel(value: object, where: str) -> Json:
    """Convert the names of an object to camelCase. Raises RequestRefused if the value is no
    object."""
    if not isinstance(value, Mapping):
        raise RequestRefused(f"{where} must be an object (got {value!r:.100})", where)
    return {camel_case(name): item for name, item in value.items()}


def json_schema(schema: object) -> Json:
    """Convert a Google schema, with types in upper case, `nullable` and numbers as strings, to a
    JSON schema.

    Names keep their order; properties are in the order of `propertyOrdering`.
    """
    source = camel(schema, "a schema")
    converted = Json()
    for name, value in source.items():
        if value is None or name in _DROPPED:
            continue
        if name == "type":
            kinds = [str(item).lower() for item in (value if isinstance(value, list) else [value])]
            if kinds != ["type_unspecified"]:
                converted["type"] = kinds if len(kinds) > 1 else kinds[0]
        elif name in _SCHEMAS:
            named = value if isinstance(value, Mapping) else {}
            order = [item for item in source.get("propertyOrdering") or () if item in named]
            converted[_SCHEMAS[name]] = {
                item: json_schema(named[item]) for item in dict.fromkeys([*order, *named])
            }
        elif name == "anyOf":
            converted[name] = [json_schema(item) for item in value]
        elif name in ("items", "additionalProperties"):
            converted[name] = json_schema(value) if isinstance(value, Mapping) else value
        elif name in _WHOLE:
            converted[name] = int(value)
        else:
            converted["$ref" if name == "ref" else name] = value
    if source.get("nullable"):
        return _nullable(converted)
    return converted


def _nullable(schema: Json) -> Json:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], {"type": "null"}]}
    kinds = schema.get("type")
    if kinds is None:
        return schema
    nullable = {**schema, "type": [*([kinds] if isinstance(kinds, str) else kinds), "null"]}
    if "enum" in schema:
        nullable["enum"] = [*schema["enum"], None]
    return nullable

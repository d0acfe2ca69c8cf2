"""A program for AgentJet whose tasks have pictures: its reader, its messages, its reward."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import requests
from PIL import Image

from ajet.default_config.ajet_config_schema import (  # type: ignore[import-not-found]
    AjetTaskReader,
    HuggingfaceDatRepo,
)
from ajet.schema.task import WorkflowOutput  # type: ignore[import-not-found]
from ajet.task_reader import HuggingFaceTaskReader  # type: ignore[import-not-found]
from ajet.tuner_lib.as_oai_baseurl_apikey import (  # type: ignore[import-not-found]
    OpenaiBaseUrlAndApiKey,
)
from ajet.utils.multimodal import (  # type: ignore[import-not-found]
    build_multimodal_messages,
    encode_image_as_data_url,
    extract_image,
    extract_images_from_openai_messages,
    load_image_to_pil,
    task_metadata_to_messages,
)
from ajet_sdk.errors import PictureError
from ajet_sdk.gateway.episode import EpisodeSpec
from ajet_sdk.gateway.gateway import Gateway
from ajet_sdk.pictures import picture_at, picture_of
from tests.drawings import Seeing, drawn, file_of, png, text, url_of

DRAWING = drawn(1, 64, 48)


def solve(task: Any, endpoint: Any) -> Any:
    """Asks about the figure, and rewards the answer in the box."""
    messages = build_multimodal_messages(
        system_prompt="Put the answer into \\boxed{}.",
        user_text=task.metadata["problem"],
        image=extract_image(task.metadata),
    )
    answered = requests.post(
        f"{endpoint.base_url}/chat/completions",
        json={"model": "any", "messages": messages, "max_tokens": 2048},
        headers={"Authorization": f"Bearer {endpoint.api_key}", "Connection": "close"},
        timeout=60,
    )
    answered.raise_for_status()
    said = answered.json()["choices"][0]["message"]["content"]
    box = re.search(r"\\boxed\{([^}]*)\}", said)
    reward = 1.0 if box and box[1] == task.metadata["answer"] else 0.0
    return WorkflowOutput(reward=reward, metadata={"final_answer": said})


@pytest.mark.parametrize("column", ["images", "image"])
def test_a_geometry_program_runs(gateway: Gateway, tmp_path: Path, column: str) -> None:
    struct = {"bytes": file_of(DRAWING), "path": None}
    row = {
        "problem": "<image>How long is x?",
        "answer": "10",
        column: [struct] if column == "images" else struct,
    }
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "train.parquet")
    repo = HuggingfaceDatRepo(dataset_path=str(tmp_path / "train.parquet"))
    [task] = HuggingFaceTaskReader(
        AjetTaskReader(huggingface_dat_repo=repo)
    ).generate_training_tasks()
    episode = gateway.open(EpisodeSpec("one", Seeing("It is \\boxed{10}.")))
    model = episode.model()
    output = solve(task, OpenaiBaseUrlAndApiKey(base_url=model.base_url, api_key=model.api_key))
    assert output.reward == 1.0
    [call] = episode.calls
    content = call.request["messages"][1]["content"]
    assert picture_at(content[0]["image_url"]["url"]) == picture_of(file_of(DRAWING))
    assert content[1] == text("<image>How long is x?")


def test_each_form_of_a_picture_becomes_the_same(tmp_path: Path) -> None:
    data = file_of(DRAWING)
    path = tmp_path / "a.png"
    path.write_bytes(data)
    forms = [
        DRAWING,
        data,
        bytearray(data),
        {"bytes": data, "path": None},
        {"bytes": None, "path": str(path)},
        str(path),
        url_of(data),
    ]
    for form in forms:
        assert picture_at(encode_image_as_data_url(form)) == picture_of(data)
        image = load_image_to_pil(form)
        assert isinstance(image, Image.Image) and image.size == (64, 48)
    link = "https://example.org/a.png"
    assert encode_image_as_data_url(link) == link


@pytest.mark.parametrize("form", [b"no picture", {}, "missing.png", 5, {"bytes": None}, b""])
def test_what_is_no_picture_is_refused(form: Any) -> None:
    with pytest.raises(PictureError):
        build_multimodal_messages(None, "?", image=form)


def test_messages_without_and_with_several_pictures() -> None:
    assert build_multimodal_messages("Be brief.", "hi") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    messages = build_multimodal_messages(None, "hi", image=png(1), images=[png(2), png(3)])
    urls = [url_of(png(seed)) for seed in (1, 2, 3)]
    assert extract_images_from_openai_messages(messages) == urls
    assert messages[0]["content"][-1] == text("hi")
    assert extract_image({"images": [url_of(png(1)), 2]}) == url_of(png(1))
    assert extract_image({"images": []}) is None and extract_image({}) is None
    metadata = {"question": "Where?", "image": png(1)}
    assert task_metadata_to_messages(metadata, None) == build_multimodal_messages(
        None, "Where?", image=png(1)
    )

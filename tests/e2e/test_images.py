"""Goal: a chat with pictures gets the tokens that the model gives for those pictures, over HTTP as
offline, and the server is as it was afterwards.

Method: greedy answers about small pictures, against a single pass of the model over prompt and
answer with features computed beside it; a real client against a real process.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

from deepinfer_jax import checkpoint, vision
from deepinfer_jax.batch import IMAGE_FEATURE, StepShape
from deepinfer_jax.model import forward, logits
from serving import LLM, SamplingParams
from serving.core.request import Request, RequestImage
from serving.engine.engine import Engine, run_step
from serving.frontend.images import EncodedPrompt
from tests.deepinfer_jax import golden_model
from tests.e2e.pictures import chat, picture
from tests.e2e.server import SMALL_ENGINE, ServerProcess

NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


CHAT = chat(picture(1, 90, 60), {"type": "text", "text": "or"}, picture(5, 42, 70))


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    process = ServerProcess(("--cache-format", "noq", *SMALL_ENGINE))
    try:
        yield process
    finally:
        process.stop()


def _rows_of(image: RequestImage) -> jax.Array:
    """Features of an image, from a vision step of its own size."""
    model, _ = golden_model.load("noq")
    parameters = checkpoint.load(golden_model.DIRECTORY, model.config, parts={"text", "vision"})
    assert parameters.vision is not None
    grid = jnp.array([image.patch_rows, image.patch_cols])
    pixels = jnp.asarray(image.pixels)
    return vision.encode_image(model.config, model.precision, parameters.vision, pixels, grid)


def _best_tokens(prompt: EncodedPrompt, answer: list[int]) -> list[int]:
    """The best token after the prompt and after each token of the answer, in one pass."""
    model, weights = golden_model.load("noq")
    ids = np.array([*prompt.token_ids, *answer[:-1]], np.int32)
    shape = StepShape(num_rows=1, num_tokens=192, num_blocks=2, samples_every_token=True)
    features = jnp.zeros((shape.num_tokens, model.config.hidden_size))
    for image in prompt.images:
        ids[image.start : image.stop] = IMAGE_FEATURE
        place = jnp.array([image.start, image.num_tokens])
        features = vision.insert(features, _rows_of(image), place)
    arrays = golden_model.batch_arrays(shape, [(ids, 0, 1, [1, 2])])

    @jax.jit
    def run(features: jax.Array) -> jax.Array:
        batch = golden_model.to_batch(shape, arrays)
        cache = golden_model.layout(model).zeros()
        residual, _ = forward(model, weights, cache, batch, image_features=features)
        return logits(model, weights, residual, jnp.arange(shape.num_tokens))

    best = np.argmax(run(features), axis=-1)
    return best[len(prompt.token_ids) - 1 : len(ids)].tolist()


def test_offline_answers_are_those_of_one_pass_over_everything(llm: LLM) -> None:
    prompt = llm._encode(CHAT)
    assert [image.num_tokens for image in prompt.images] == [10, 6]
    assert len(prompt.token_ids) > 64, "the prompt takes several prefill steps"
    (output,) = llm.generate([CHAT], GREEDY)
    assert output.prompt_tokens == len(prompt.token_ids)
    assert output.token_ids == _best_tokens(prompt, output.token_ids)


def test_answers_depend_on_the_picture_and_not_on_the_company(llm: LLM) -> None:
    (alone,) = llm.generate([CHAT], GREEDY)
    other = chat(picture(9, 90, 60), {"type": "text", "text": "or"}, picture(5, 42, 70))
    swapped = chat(picture(5, 42, 70), {"type": "text", "text": "or"}, picture(1, 90, 60))
    blind = [{"role": "user", "content": "What is it?"}]
    outputs = llm.generate([blind, other, CHAT, swapped, CHAT, blind], GREEDY)
    tokens = [output.token_ids for output in outputs]
    assert tokens[2] == tokens[4] == alone.token_ids
    assert tokens[0] == tokens[5]
    assert len({tuple(some) for some in tokens}) == 4


def test_http_answers_equal_offline_ones(server: ServerProcess, llm: LLM) -> None:
    (offline,) = llm.generate([CHAT], GREEDY)
    free_blocks = server.metric("deepinfer_kv_blocks_free")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:

        def ask(messages: Any) -> Any:
            return client.chat.completions.create(
                model="tiny-v41",
                messages=messages,
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"ignore_eos": True},
            )

        answer = ask(CHAT)
        broken = chat(picture(1, 90, 60), {"type": "image_url", "image_url": {"url": "x"}})
        with pytest.raises(openai.BadRequestError, match="Image 2"):
            ask(broken)
        again = ask(CHAT)
    assert answer.usage.prompt_tokens == offline.prompt_tokens
    said = answer.choices[0].message
    text = (said.model_extra or {}).get("reasoning_content", "") + (said.content or "")
    # A character that the last token leaves unfinished is shown offline only.
    assert text.rstrip("\ufffd") == offline.text.rstrip("\ufffd")
    assert again.choices[0].message == said
    assert server.metric("deepinfer_kv_blocks_free") == free_blocks


def test_features_made_elsewhere_give_the_same_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    (expected,) = llm.generate([CHAT], GREEDY)
    prompt, engine = llm._encode(CHAT), llm._engine
    assert isinstance(engine, Engine)
    executor: Any = llm._model.executor
    for image in prompt.images:
        grid = (image.patch_rows, image.patch_cols)
        rows = executor._images.encoded(image.pixels, grid, image.num_tokens)
        assert rows.dtype == np.uint8 and rows.shape == (image.num_tokens, 4 * 64)
        engine.features.put("given", image.digest, rows)
    # Nothing is encoded by the steps.
    monkeypatch.setattr(executor._images, "add", None)
    engine.admit(
        Request("given", prompt.token_ids, GREEDY, images=prompt.images, cache_salt="alone")
    )
    tokens: list[int] = []
    while engine.has_work:
        tokens += [token for d in run_step(engine, executor) for token in d.token_ids]
    assert tokens == expected.token_ids and engine.features.num_bytes == 0
    with pytest.raises(ValueError, match=r"\[2, 8\]; expected at most 64 rows of 256 bytes"):
        executor._images.add_encoded(np.zeros((2, 8), np.uint8), (0, 2))


def test_a_plan_with_images_needs_an_encoder(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    executor: Any = llm._model.executor
    prompt = llm._encode(CHAT)
    llm._engine.admit(Request("blind", prompt.token_ids, GREEDY, images=prompt.images))
    plans = []
    try:
        while not (plans and plans[-1].images):
            plan = llm._engine.plan()
            assert plan is not None
            plans.append(plan)
            if not plan.images:
                executor.submit(plan)
                llm._engine.commit(executor.collect())
        monkeypatch.setattr(executor, "_images", None)
        with pytest.raises(ValueError, match="the model has no image encoder"):
            executor.submit(plans[-1])
    finally:
        llm._engine.fail()

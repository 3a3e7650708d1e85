"""The official openai client, synchronous and not, against the real server."""

from __future__ import annotations

import asyncio

import openai
import pytest

from tests.known_bugs.helpers import greedy, oracle, tiny
from tests.server.served import NAME, USER, scripted, toy_engine

PIECES = ["Hé", "llo", " wörld", " 👍", "!"]


def test_models_are_listed_and_retrieved(serve):
    client = serve(scripted("a")).client()
    assert [card.id for card in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "zero-to-engine"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other/model")


def test_a_chat_whole_and_streamed(serve):
    client = serve(scripted(*PIECES)).client()
    whole = client.chat.completions.create(model=NAME, messages=USER)
    assert whole.choices[0].message.content == "".join(PIECES) and whole.choices[0].finish_reason == "stop"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (2, 6, 8)
    chunks = list(client.chat.completions.create(
        model=NAME, messages=USER, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == "".join(PIECES)
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant"] + [None] * (len(chunks) - 2)
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details})
    assert len({chunk.id for chunk in chunks}) == 1 and {chunk.object for chunk in chunks} == {"chat.completion.chunk"}


def test_content_may_be_parts_of_text(serve):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answer = serve(scripted("x")).client().chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": parts}])
    assert answer.usage.prompt_tokens == 2


def test_completions_of_text_of_ids_and_of_several_prompts(serve):
    served = serve(toy_engine(tiny()))
    client = served.client()
    expected = [oracle(tiny(), prompt, greedy(6)) for prompt in ([72, 105], [66, 121, 101])]
    said = ["".join(chr(i) for i in ids if i > 2) for ids in expected]

    def ask(prompt, **options):
        return client.completions.create(model=NAME, prompt=prompt, temperature=0, max_tokens=6, **options)

    assert [choice.text for choice in ask("Hi").choices] == said[:1]
    assert [choice.text for choice in ask([72, 105]).choices] == said[:1]
    answer = ask(["Hi", "Bye"], n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == [
        (0, said[0]), (1, said[0]), (2, said[1]), (3, said[1])]
    assert answer.usage.prompt_tokens == 5 and answer.usage.completion_tokens == 24
    streamed = {}
    for chunk in ask([[72, 105], [66, 121, 101]], n=2, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] = streamed.get(choice.index, "") + choice.text
    assert [streamed[i] for i in range(4)] == [said[0], said[0], said[1], said[1]]


def test_a_seed_repeats_an_answer_and_vllms_options_arrive(serve):
    client = serve(toy_engine(tiny())).client()

    def ask(**options):
        return client.completions.create(model=NAME, prompt="Hi", max_tokens=20, n=2, **options).choices

    first, again, other = ask(seed=5), ask(seed=5), ask(seed=6)
    assert [c.text for c in first] == [c.text for c in again] != [c.text for c in other]
    assert len({c.text for c in first}) == 2
    greedy_by_top_k = ask(extra_body={"top_k": 1, "ignore_eos": True})
    assert greedy_by_top_k[0].text == greedy_by_top_k[1].text and greedy_by_top_k[0].finish_reason == "length"
    biased = ask(logit_bias={"81": 100}, seed=1)
    assert {c.text for c in biased} == {"Q" * 20}


def test_logprobs_of_both_formats_whole_and_streamed(serve):
    client = serve(toy_engine(tiny())).client()
    whole = client.completions.create(model=NAME, prompt="Hi", temperature=0, max_tokens=8, logprobs=2)
    old = whole.choices[0].logprobs
    assert len(old.tokens) == len(old.token_logprobs) == len(old.top_logprobs) == len(old.text_offset) == 8
    assert all(row[token] == value for row, token, value in zip(old.top_logprobs, old.tokens, old.token_logprobs))
    new = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=8, logprobs=True,
        top_logprobs=2).choices[0].logprobs.content
    assert [entry.token for entry in new] == old.tokens
    assert [bytes(entry.bytes).decode() for entry in new] == old.tokens
    assert [{t.token: t.logprob for t in entry.top_logprobs} for entry in new] == old.top_logprobs
    chunks = client.chat.completions.create(
        model=NAME, messages=[{"role": "user", "content": "Hi"}], temperature=0, max_tokens=8, logprobs=True,
        top_logprobs=2, stream=True)
    streamed = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert streamed == new
    pieces = client.completions.create(model=NAME, prompt="Hi", temperature=0, max_tokens=8, logprobs=2, stream=True)
    offsets = [offset for chunk in pieces for offset in chunk.choices[0].logprobs.text_offset]
    assert offsets == old.text_offset


@pytest.mark.parametrize("change, kind", [
    ({"model": "gpt-4"}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError),
    ({"max_tokens": 0}, openai.BadRequestError), ({"extra_body": {"best_of": 2}}, openai.BadRequestError),
])  # fmt: skip
def test_errors_are_those_that_the_client_knows(serve, change, kind):
    client = serve(scripted("a")).client()
    with pytest.raises(kind) as caught:
        client.completions.create(**{"model": NAME, "prompt": "ab", **change})
    assert caught.value.body["message"] and caught.value.type == "invalid_request_error"
    assert client.completions.create(model=NAME, prompt="ab").choices[0].text == "a"


def test_a_key_is_needed_if_one_is_set(serve):
    served = serve(scripted("a"), api_key="secret")
    for wrong in ("Secret", "secre", "secret ", "", "ключ"):
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError, openai.OpenAIError)):
            served.client(api_key=wrong).models.list()
    assert served.client().completions.create(model=NAME, prompt="ab").choices[0].text == "a"
    status, head = served.get("/v1/models")[0], served.get("/health")[0]
    assert (status, head) == (200, 200)


def test_an_async_client_streams_many_at_once_and_leaves_in_the_middle(serve):
    served = serve(scripted(*"abcdefghij" * 10, seconds=0.002, max_num_seqs=16, num_blocks=512))

    async def work():
        async with served.async_client() as client:
            async def one(take):
                stream = await client.chat.completions.create(model=NAME, messages=USER, stream=True)
                text = ""
                async for chunk in stream:
                    text += chunk.choices[0].delta.content
                    if len(text) >= take:
                        await stream.close()
                        break
                return text

            return await asyncio.gather(*(one(take) for take in [5, 1000] * 8))

    said = asyncio.run(asyncio.wait_for(work(), 30))
    assert all(text == "abcdefghij" * 10 for text in said[1::2]) and all(len(text) < 100 for text in said[::2])
    assert served.idle()

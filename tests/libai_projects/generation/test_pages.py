"""Which pages sequences have: by a model of them that keeps each sequence's tokens apart."""

from __future__ import annotations

import numpy as np
import pytest

from libai_projects.models.pages import NoPagesError, PagedCache, Step


def pages_of(cache: PagedCache, number: int) -> list[int]:
    return [page for page in cache.tables([number])[0].tolist() if page >= 0]


def test_a_sequence_has_pages_for_its_tokens() -> None:
    cache = PagedCache(4)
    number, known = cache.add()
    assert (known, cache.length(number), pages_of(cache, number)) == (0, 0, [])
    for count, pages in ((64, 1), (1, 2), (63, 2), (65, 4)):
        cache.extend(number, count)
        assert len(set(pages_of(cache, number))) == pages
        assert cache.free == 4 - pages
    with pytest.raises(NoPagesError, match="0 of 4 pages left and a sequence needs 1"):
        cache.extend(number, 64)
    assert cache.length(number) == 193
    other, _ = cache.add()
    assert cache.tables([other, number]).tolist()[0] == [-1] * 4
    cache.release(number)
    assert cache.free == 4


def test_without_a_capacity_pages_are_made() -> None:
    cache = PagedCache()
    number, _ = cache.add()
    cache.extend(number, 6400)
    assert cache.pages == 100
    cache.release(number)
    cache.extend(cache.add()[0], 640)
    assert cache.pages == 100


def test_a_copy_gets_pages_of_its_own_when_it_is_written_to() -> None:
    cache = PagedCache(5)
    first, _ = cache.add()
    cache.extend(first, 100)
    second, third = cache.fork(first), cache.fork(first)
    assert pages_of(cache, first) == pages_of(cache, second)
    assert cache.free == 3
    before = pages_of(cache, first)
    assert cache.pages_needed(dict.fromkeys((first, second, third), 1)) == 2
    for number in (second, third):
        assert cache.pages_needed({number: 1}) == 1
        cache.extend(number, 1)
    # Who is left alone with a page keeps it.
    assert cache.pages_needed({first: 1}) == 0
    cache.extend(first, 1)
    assert pages_of(cache, first) == before
    copied = [pages_of(cache, number)[1] for number in (second, third)]
    assert len({before[1], *copied}) == 3
    assert cache.take_copies().tolist() == [[before[1], page] for page in copied]
    assert cache.take_copies().shape == (0, 2)
    # A page that is full is never written to again.
    whole, _ = cache.add()
    cache.extend(whole, 64)
    cache.fork(whole)
    with pytest.raises(NoPagesError):
        cache.extend(whole, 1)
    assert not cache.take_copies().size


def test_equal_beginnings_share_whole_pages() -> None:
    tokens = list(range(200))
    cache = PagedCache(8)
    first, _ = cache.add(tokens)
    cache.extend(first, 200)
    assert cache.add(tokens, share=True)[1] == 0
    cache.remember(first, tokens)
    for prompt, known in (
        (tokens, 192),
        (tokens[:192], 128),
        (tokens[:193], 192),
        ([*tokens[:130], 7], 128),
        ([7, *tokens[1:]], 0),
        (tokens[:64], 0),
        ([], 0),
    ):
        number, found = cache.add(prompt, share=True)
        assert (found, cache.length(number)) == (known, known)
        assert pages_of(cache, number) == pages_of(cache, first)[: known // 64]
        cache.release(number)
    assert cache.add(tokens)[1] == 0


def test_what_is_remembered_stays_until_the_room_is_needed() -> None:
    tokens = list(range(128))
    cache = PagedCache(3)
    first, _ = cache.add()
    cache.extend(first, 128)
    cache.remember(first, tokens)
    pages = pages_of(cache, first)
    cache.release(first)
    assert cache.free == 3
    again, known = cache.add([*tokens, 1], share=True)
    assert (known, pages_of(cache, again), cache.free) == (128, pages, 1)
    cache.release(again)
    # The unused page first, then the end of what is remembered.
    other, _ = cache.add()
    cache.extend(other, 128)
    assert pages[0] not in pages_of(cache, other)
    assert cache.add([*tokens, 1], share=True)[1] == 64


def test_random_use_loses_no_page_and_gives_none_to_two() -> None:
    """Contents of pages, as tensors would have them, are those of each sequence."""
    rng = np.random.default_rng(0)
    cache, shared = PagedCache(12), 0
    contents: dict[int, dict[int, int]] = {}
    texts: dict[int, list[int]] = {}
    for _ in range(2000):
        action = rng.integers(4)
        if action == 0 and len(texts) < 6:
            tokens = [0] * int(rng.integers(1, 200))
            number, known = cache.add(tokens, share=True)
            texts[number], shared = tokens[:known], shared + known
        elif texts:
            number = int(rng.choice(list(texts)))
            if action == 1:
                cache.remember(number, texts[number])
                cache.release(number)
                del texts[number]
            elif action == 2 and len(texts) < 6:
                texts[cache.fork(number)] = list(texts[number])
            else:
                new = [int(rng.random() < 0.2)] * int(rng.integers(1, 70))
                before = cache.free
                needed = cache.pages_needed({number: len(new)})
                try:
                    cache.extend(number, len(new))
                except NoPagesError:
                    assert before < needed
                    continue
                assert cache.free == before - needed
                for origin, copy in cache.take_copies().tolist():
                    contents[copy] = dict(contents[origin])
                table = pages_of(cache, number)
                for place, token in enumerate(new, len(texts[number])):
                    contents.setdefault(table[place // 64], {})[place % 64] = token
                texts[number] += new
        for number, text in texts.items():
            table = pages_of(cache, number)
            assert [contents[table[i // 64]][i % 64] for i in range(len(text))] == text
    for number in texts:
        cache.release(number)
    assert shared
    assert (cache.free, cache.pages) == (12, 12)


def test_a_step_goes_through_json() -> None:
    none = np.empty((0, 2), np.int32)
    one = np.zeros(1, np.int32)
    step = Step(np.array([5]), one, one, np.array([[3, -1]], np.int32), none, np.array([0]))
    found = Step.of_json(step.as_json())
    for name, array in vars(step).items():
        np.testing.assert_array_equal(getattr(found, name), array)
        assert getattr(found, name).dtype == array.dtype

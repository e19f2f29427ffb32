"""Functions that build span masks for `spans=` of `megatron_cp_plugin.attention`.

Each one covers tokens from `start` on, so that lists of several samples of one sequence are simply
added: `prefix_lm(100, 500) + prefix_lm(20, 300, start=500)`. In the pictures queries are rows, keys
are columns, and x is a pair that is seen.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import SupportsIndex

from torch import Tensor

from megatron_cp_plugin.core.masks.slices import Slice
from megatron_cp_plugin.errors import ContextParallelError, whole_number

# A number of tokens; or a number of tokens that several trees share, and these trees.
type Tree = SupportsIndex | tuple[SupportsIndex, Sequence[Tree]]


def documents(
    cu_seqlens: Sequence[int] | Tensor, *, causal: bool = True, window: int | None = None
) -> list[Slice]:
    """Packed documents: each token attends to its own document only, and to no later tokens.

    `documents([0, 2, 5])`, and with `window=2`:

        x . . . .    x . . . .
        x x . . .    x x . . .
        . . x . .    . . x . .
        . . x x .    . . x x .
        . . x x x    . . . x x

    Args:
        cu_seqlens: cumulative lengths; may start above 0. Copied: a tensor may change afterwards.
        causal: False: later tokens of the document too.
        window: attend only to this many last tokens, including the token itself. Causal only.

    Raises: ContextParallelError for lengths that descend, and a window that makes no sense.
    """
    if window is not None and (window < 1 or not causal):
        shape = "causal" if causal else "full"
        raise ContextParallelError(
            f"a window is 1 or more and needs causal documents, got {window} with {shape} ones: "
            "leave window out"
        )
    found = []
    for start, stop in pairwise(whole_number("documents", edge) for edge in cu_seqlens):
        _check_count("documents", stop - start, "a length of 0 or more")
        whole = stop if window is None else min(start + window, stop)
        found.append(Slice(start, whole, start, whole, "causal" if causal else "full"))
        if whole < stop:
            found.append(Slice(whole, stop, whole - (window or 0) + 1, stop, "bi_causal"))
    return found


def prefix_lm(prefix: int, length: int, *, start: int = 0) -> list[Slice]:
    """A prefix that sees all of itself, and later tokens that see all tokens before them.

    `prefix_lm(2, 4)`:

        x x . .
        x x . .
        x x x .
        x x x x

    Args:
        prefix: its tokens.
        length: all tokens.

    Raises: ContextParallelError for a prefix that is longer than all.
    """
    _check_count("prefix_lm", prefix, "a prefix of 0 or more tokens")
    _check_count("prefix_lm", length - prefix, f"{prefix} tokens or more for such a prefix", length)
    middle, stop = start + prefix, start + length
    return [Slice(start, middle, start, middle), Slice(middle, stop, start, stop, "causal")]


def shared_prefix(tree: Tree, *, start: int = 0) -> list[Slice]:
    """Sequences that share prefixes, each of which is there once: a tree, parents before children.

    Every token sees its node up to itself, and all of the nodes above, as if each path
    from the root to a leaf were a sequence of its own. `shared_prefix((2, [1, 2]))`:

        x . . . .    the prefix
        x x . . .
        x x x . .    one sequence that goes on from it
        x x . x .    another one
        x x . x x

    Args:
        tree: a node is its number of tokens, or (that number, [children]); children may have
            children. `(32768, [4096] * 8)` is a prefix with 8 rollouts.

    Raises: ContextParallelError for a node of a negative number of tokens.
    """
    found: list[Slice] = []
    _grow(tree, start, found)
    return found


def shared_prefix_positions(tree: Tree) -> list[int]:
    """Position of each token of `shared_prefix` in its own sequence: for rotary embeddings.

    `shared_prefix_positions((2, [1, 2]))` is [0, 1, 2, 2, 3].
    """
    return list(_tree_positions(tree, 0))


def _grow(tree: Tree, start: int, found: list[Slice]) -> int:
    """Adds the slices of a tree. Returns: where it ends."""
    tokens, children = _node(tree)
    _check_count("shared_prefix", tokens, "nodes of 0 or more tokens")
    middle = stop = start + tokens
    found.append(Slice(start, middle, start, middle, "causal"))
    for child in children:
        stop = _grow(child, stop, found)
    if middle < stop:
        found.append(Slice(middle, stop, start, middle))
    return stop


def _node(tree: Tree) -> tuple[int, Sequence[Tree]]:
    """Tokens of a node, and its children."""
    tokens, children = tree if isinstance(tree, Sequence) else (tree, ())
    return whole_number("shared_prefix", tokens), children


def _tree_positions(tree: Tree, first: int) -> Iterator[int]:
    tokens, children = _node(tree)
    yield from range(first, first + tokens)
    for child in children:
        yield from _tree_positions(child, first + tokens)


def image_blocks(length: int, images: Sequence[tuple[int, int]], *, start: int = 0) -> list[Slice]:
    """Text that sees all tokens before it, and images whose tokens see each other too.

    `image_blocks(5, [(1, 3)])`:

        x . . . .
        x x x . .    tokens 1 and 2 are an image
        x x x . .
        x x x x .
        x x x x x

    Args:
        length: all tokens.
        images: [first, last) of each, from `start` on, in ascending order.

    Raises: ContextParallelError for images that are not ascending, or not within the length.
    """
    edges = [0, *(edge for image in images for edge in image), length]
    if any(a > b for a, b in pairwise(edges)):
        raise ContextParallelError(
            f"image_blocks needs ascending images that do not overlap within 0 to {length}, got "
            f"{list(images)}: sort them"
        )
    return [
        Slice(start + begin, start + end, start, start + end, "full" if number % 2 else "causal")
        for number, (begin, end) in enumerate(pairwise(edges))
        if begin < end
    ]


def block_diffusion(length: int, block: int, *, start: int = 0) -> list[Slice]:
    """Training of block diffusion: a noisy copy of a sample, and after it the clean one.

    A noisy block sees itself and the clean blocks before it; a clean block sees itself and the
    clean blocks before it. `block_diffusion(4, 2)`, of 8 tokens:

        x x . . . . . .    noisy
        x x . . . . . .
        . . x x x x . .
        . . x x x x . .
        . . . . x x . .    clean
        . . . . x x . .
        . . . . x x x x
        . . . . x x x x

    Args:
        length: tokens of the sample, half of all.
        block: tokens of a block; the last one may have fewer.

    Raises: ContextParallelError for lengths below 0, or blocks below 1 token.

    Source: Block Diffusion (BD3-LM), section 3.3: block-diagonal, offset block-causal and
    block-causal masks.
    """
    _check_count("block_diffusion", length, "a length of 0 or more")
    _check_count("block_diffusion", block - 1, "a block of 1 or more tokens", block)
    found, clean = [], start + length
    for first in range(0, length, block):
        last = min(first + block, length)
        noisy = start + first, start + last
        found.append(Slice(*noisy, *noisy))
        if first:
            found.append(Slice(*noisy, clean, clean + first))
        found.append(Slice(clean + first, clean + last, clean, clean + last))
    return found


def _check_count(maker: str, number: int, needs: str, got: int | None = None) -> None:
    """Raises: ContextParallelError if a number is negative."""
    if number < 0:
        raise ContextParallelError(f"{maker} needs {needs}, got {number if got is None else got}")

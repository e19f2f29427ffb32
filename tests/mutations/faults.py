"""Faults that the tests must find, one a row: see `check.py`.

A row whose text has gone from its file fails a test: give it the text that has taken its place, or
put another fault of the kind in its place.
"""

from typing import NamedTuple

PACKAGE = "megatron_cp_plugin"


class Fault(NamedTuple):
    """A change of the code that makes it wrong.

    Attributes: file: in the package. before: text that the file has once. after: what takes its
        place. what: the fault in words. test: the one that found it last, in the folder of tests,
        and is tried first.
    """

    file: str
    before: str
    after: str
    what: str
    test: str

    def applies(self, text: str) -> bool:
        """Whether the file's text has the place."""
        return text.count(self.before) == 1


FAULTS = (
    # core: merges and sums
    Fault(
        "core/partial.py",
        "merged = torch.logaddexp(a_lse, b_lse)",
        "merged = torch.logaddexp2(a_lse, b_lse)",
        "two partials are merged with lse in log2",
        "core/test_grid.py::test_merging_many_partials",
    ),
    Fault(
        "core/partial.py",
        "merged = torch.logsumexp(lses, 0)",
        "merged = lses.amax(0)",
        "many partials are merged with the largest lse for that of all",
        "core/test_grid.py::test_merging_many_partials",
    ),
    Fault(
        "core/partial.py",
        "torch.where(merged == -torch.inf, 0.0, torch.exp(lse - merged))",
        "torch.exp(lse - merged)",
        "rows without any key become NaN",
        "core/test_grid.py::test_merging_many_partials",
    ),
    Fault(
        "core/partial.py",
        "        self._merge_last()\n        self._last, self._borrowed = (rows",
        "        self._last, self._borrowed = (rows",
        "a partial is dropped when the next one comes",
        "core/test_partial.py::test_any_split_of_the_keys_in_any_order_gives_the_whole",
    ),
    Fault(
        "core/partial.py",
        "self._wide = accumulation_dtype(q.dtype)",
        "self._wide = q.dtype",
        "partial outputs are merged in bfloat16",
        "core/test_partial.py::test_partials_of_some_rows",
    ),
    Fault(
        "core/partial.py",
        "return accumulation_dtype(self._like.dtype)",
        "return self._like.dtype",
        "gradients are summed in bfloat16",
        "core/test_partial.py::test_sums_of_bf16_gradients_lose_nothing_but_the_last_rounding",
    ),
    Fault(
        "core/partial.py",
        "out.copy_(sum((b.to(wide) for b in others), start=a.to(wide)))",
        "out.copy_(sum(others, start=a))",
        "two gradients are added in bfloat16",
        "core/test_partial.py::test_sums_of_bf16_gradients_lose_nothing_but_the_last_rounding",
    ),
    Fault(
        "core/partial.py",
        "(dout.to(dtype) * out.to(dtype)).sum(-1)",
        "(dout * out).sum(-1).to(dtype)",
        "delta is summed in bfloat16",
        "core/test_partial.py::test_delta",
    ),
    # core: tiles, layouts, documents
    Fault(
        "core/bands.py",
        "(high - later) // common",
        "(high - later - 1) // common",
        "no token of a cyclic layout sees itself",
        "algorithms/test_collective_conformance.py::test_every_grid",
    ),
    Fault(
        "core/bands.py",
        "max(self.low, kv.start - q.stop + 1) <=",
        "max(self.low, kv.start - q.stop + 2) <=",
        "a block of which one key is seen by one query is left out",
        "test_spans.py::test_tiles_cover_every_pair_once",
    ),
    Fault(
        "core/bands.py",
        "seen = begin < end",
        "seen = begin < end - 1",
        "keys are left out of which a span of queries sees one alone",
        "test_touched_rows.py::test_touched_rows_of_all_pairs",
    ),
    Fault(
        "core/bands.py",
        "np.minimum(x_stop, y_stop - low)",
        "np.minimum(x_stop, y_stop - low - 1)",
        "the last row that a window reaches is not among those of a pair of blocks",
        "test_touched_rows.py::test_touched_rows",
    ),
    Fault(
        "core/tiles.py",
        "low = None if mask.window is None else 1 - mask.window",
        "low = None if mask.window is None else -mask.window",
        "windows are one token too wide",
        "test_windows.py::test_equals_unsplit_attention",
    ),
    Fault(
        "core/tiles.py",
        "middle if joins_upper else top, top + rows",
        "top, top + rows",
        "rectangular causal tiles leave out what all of their rows see",
        "core/test_tiles.py::test_any_ascending_spans",
    ),
    Fault(
        "core/slices.py",
        'low = np.where(kind >= KINDS.index("inverse_causal")',
        'low = np.where(kind == KINDS.index("inverse_causal")',
        "bi_causal spans have no lower edge",
        "test_spans.py::test_tiles_cover_every_pair_once",
    ),
    Fault(
        "core/slices.py",
        "low, high = np.maximum(low, k_start - q_stop + 1), np.minimum(high, k_stop - 1 - q_start)",
        "low, high = np.maximum(low, k_start - q_stop), np.minimum(high, k_stop - 1 - q_start)",
        "spans that touch at a corner are refused",
        "test_spans.py::test_pairs_that_are_named_twice_are_found",
    ),
    Fault(
        "core/tiles.py",
        "self.rows * (self.cols - self.rows) + self.rows * (self.rows + 1) // 2",
        "self.rows * (self.cols - self.rows) + self.rows * (self.rows - 1) // 2",
        "pairs of causal tiles are counted without the diagonal",
        "test_conformance.py::test_equals_unsplit_attention_and_keeps_its_plan",
    ),
    Fault(
        "core/layout.py",
        "start = index * size + min(index, rest)",
        "start = index * size",
        "chunks overlap where lengths do not divide",
        "test_conformance.py::test_equals_unsplit_attention_and_keeps_its_plan",
    ),
    Fault(
        "core/layout.py",
        "for chunk in (rank, 2 * size - 1 - rank)",
        "for chunk in (rank, size + rank)",
        "zigzag pairs chunks p and P + p: right results, unequal work",
        "core/test_grid.py::test_zigzag_grids_are_balanced_to_the_token",
    ),
    Fault(
        "core/bands.py",
        "q_first = np.maximum(-((q_residue - q_start) // common), q.start)",
        "q_first = np.maximum((q_start - q_residue) // common, q.start)",
        "a cyclic block has a token of the document before",
        "core/test_plan.py::test_every_plan_is_correct",
    ),
    Fault(
        "core/balance.py",
        "remaining / (rank + 1)",
        "remaining / size",
        "ranks are given a share of what is left by those before them",
        "core/test_layout.py::test_ranks_have_equal_work_whatever_the_documents",
    ),
    # core: plans and their execution
    Fault(
        "core/derive.py",
        "start, stop = tokens * index // count, tokens * (index + 1) // count",
        "start, stop = tokens // count * index, tokens // count * (index + 1)",
        "the odd row of a block that two ranks share is computed by none",
        "core/test_execute.py::test_copy_engines_find_what_they_need",
    ),
    Fault(
        "core/derive.py",
        "min(self.first, step), max(self.last, step)",
        "min(self.first, step), self.last",
        "results leave after the first of several steps",
        "core/test_plan.py::test_every_plan_is_correct",
    ),
    Fault(
        "core/derive.py",
        "rows = tuple((start + first, start + last) for first, last in rows)",
        "rows = tuple((first, start + last) for first, last in rows)",
        "a helper gets rows that it does not compute",
        "core/test_plan.py::test_no_row_travels_in_vain",
    ),
    Fault(
        "core/derive_heads.py",
        "owner, share = (target, source - first) if back else (source, target - first)",
        "owner, share = (source, source - first) if back else (source, target - first)",
        "plans of Ulysses give results back as those of the rank that computed them",
        "core/test_plan.py::test_every_plan_is_correct",
    ),
    Fault(
        "core/plan.py",
        'dim = shape.value_dim if name in ("v", "dv", "out", "dout") else shape.head_dim',
        'dim = shape.value_dim if name in ("v", "out", "dout") else shape.head_dim',
        "bytes of dV are counted with the head dim of K",
        "core/test_plan.py::test_ring",
    ),
    Fault(
        "core/memory.py",
        "        self._living.discard(key)\n        self.now -= size\n",
        "        self._living.discard(key)\n",
        "memory that is freed still counts",
        "core/test_memory.py::test_prediction_is_what_ranks_need",
    ),
    Fault(
        "core/passes.py",
        "dk, dv = self._sums[task.heads.q.start, True]",
        "dv, dk = self._sums[task.heads.q.start, True]",
        "dK and dV of the own block are swapped",
        "core/test_execute.py::test_copy_engines_find_what_they_need",
    ),
    Fault(
        "core/passes.py",
        "return tuple(x.clone() for x in before.tensors)",
        "return before.tensors",
        "a sum is passed on from the buffer that the next one comes into",
        "core/test_execute.py::test_sums_that_a_rank_passes_on_as_they_came",
    ),
    Fault(
        "core/passes.py",
        "total.add(rows, out, lse, borrowed=True)",
        "total.add(slice(0, out.shape[1]), out, lse, borrowed=True)",
        "a helper's rows are merged into the first ones",
        "test_foreign_algorithm.py::test_conformance_plan_bytes_cost_and_picture",
    ),
    Fault(
        "core/execute.py",
        "self._work.close(move.heads, move.of_keys, Packed(move.block.rows, tensors))",
        "self._work.close(move.heads, move.of_keys, None)",
        "the last sum that comes for the own block is dropped",
        "core/test_execute.py::test_copy_engines_find_what_they_need",
    ),
    Fault(
        "core/execute.py",
        "            under_way.wait()\n",
        "",
        "messages are used before they are there",
        "core/test_execute.py::test_copy_engines_find_what_they_need",
    ),
    Fault(
        "core/function.py",
        "scale = head_dim**-0.5 if scale is None else scale",
        "scale = head_dim**-0.5",
        "the scale that was given is forgotten",
        "integration/test_attention.py::test_against_attention_written_out",
    ),
    Fault(
        "core/function.py",
        "dsink = -(torch.sigmoid(-margin) * delta_of(dout, out))",
        "dsink = (torch.sigmoid(-margin) * delta_of(dout, out))",
        "the gradient of sinks has the wrong sign",
        "test_sinks.py::test_equals_unsplit_attention",
    ),
    Fault(
        "core/recompute.py",
        "return waiting.popleft() if waiting else None",
        "return waiting.pop() if waiting else None",
        "a layer that runs twice in a checkpoint gets its results in the wrong order",
        "core/test_recompute.py::test_micro_batches_in_any_order",
    ),
    # core: communication
    Fault(
        "core/comm.py",
        "dist.P2POp(dist.isend, tensor, self._ranks[to], self._group)",
        "dist.P2POp(dist.isend, tensor, to, self._group)",
        "messages go to ranks of the job, not of the group",
        "integration/test_training.py::test_model_parallel_beside_context_parallel",
    ),
    Fault(
        "core/comm.py",
        "                    work.wait()\n",
        "                    work.is_completed()\n",
        "nobody waits for messages of process groups",
        "test_functional.py::test_the_readme_s_snippet_splits",
    ),
    Fault(
        "core/comm.py",
        "sum(t.numel() * t.element_size() for t in tensors)",
        "sum(t.numel() * 2 for t in tensors)",
        "all elements are counted as two bytes",
        "test_conformance.py::test_equals_unsplit_attention_and_keeps_its_plan",
    ),
    Fault(
        "core/peer.py",
        "        copies.wait_stream(current)\n",
        "",
        "copies to peers do not wait for what is copied",
        "core/test_peer.py::test_blocks_are_whole",
    ),
    Fault(
        "core/peer.py",
        "                copies.wait_stream(reader[0])\n",
        "                pass\n",
        "a slot is offered while another stream reads it",
        "core/test_peer.py::test_blocks_are_whole",
    ),
    Fault(
        "core/virtual.py",
        "            self._slab[start : start + self._slot_bytes] = _NAN\n",
        "            pass\n",
        "virtual peers do not poison a slot that is given on",
        "test_transport.py::test_a_block_that_is_read_too_late_is_not_there",
    ),
    Fault(
        "core/lengths.py",
        "    lengths.unequal |= len({tokens for tokens, *_ in held}) > 1\n",
        "",
        "ranks forget that there are shards of unequal lengths",
        "test_functional.py::test_ranks_remember_that_there_are_unequal_shards",
    ),
    # core: linear attention
    Fault(
        "core/linear.py",
        "out = (out.to(wide) + later.flip(1).to(wide) - own).to(q.dtype)",
        "out = (out.to(wide) + later.flip(1).to(wide)).to(q.dtype)",
        "full linear attention counts each token itself twice",
        "test_linear_conformance.py::test_equals_the_recurrence",
    ),
    Fault(
        "core/linear.py",
        "return dq, dk, dv, end if self.topology.rank == back.last_rank else None",
        "return dq, dk, dv, end",
        "every rank has the gradient of the initial state",
        "test_linear_conformance.py::test_equals_the_recurrence",
    ),
    Fault(
        "core/decay.py",
        "0.0 if n is None else rate**n",
        "0.0 if n is None else rate ** (n + 1)",
        "states decay by one token too many between ranks",
        "test_linear_conformance.py::test_equals_the_recurrence",
    ),
    # kernels
    Fault(
        "core/kernel.py",
        "None if self.delta is None else self.delta.flip(2)",
        "self.delta",
        "delta keeps its order where rows are reversed",
        "test_windows.py::test_equals_unsplit_attention",
    ),
    Fault(
        "core/kernel.py",
        "torch.where(square > 0, delta / square * wide, 0.0)",
        "torch.where(square > 0, delta * wide, 0.0)",
        "the stand-in for out is too long",
        "kernels/test_kernels.py::test_cpu_kernels",
    ),
    Fault(
        "kernels/reference.py",
        "ds = p * (dp - delta) * scale",
        "ds = p * (dp - delta)",
        "gradients of scores are not scaled",
        "kernels/test_kernels.py::test_cpu_kernels",
    ),
    Fault(
        "kernels/torch_flash.py",
        "        return equal_dims_reason(problem)\n",
        "        return None\n",
        "the CPU kernel no longer refuses values of another width",
        "test_conformance.py::test_equals_unsplit_attention_and_keeps_its_plan",
    ),
    Fault(
        "core/kernel.py",
        "starts = torch.arange(batch)[:, None] * ends[:, None] + bounds",
        "starts = torch.arange(batch)[:, None] + bounds",
        "documents of later batch entries begin in the first one",
        "kernels/test_flash2.py::test_documents",
    ),
    Fault(
        "core/tile_batches.py",
        "return few_rows and ascend and few_cols",
        "return few_rows and few_cols",
        "tiles that share keys are one backward call where they are",
        "core/test_tile_batches.py::test_calls_compute_the_pairs_of_their_tiles",
    ),
    Fault(
        "core/algorithm.py",
        "    for cols in keys.given:\n",
        "    for cols in keys.given[:1]:\n",
        "keys that several tiles of a call share get the gradients of one",
        "kernels/test_packed.py::test_tiles_of_all_kinds",
    ),
    Fault(
        "kernels/fused.py",
        "lse = tl.where(empty, nothing, high + tl.log(tl.where(empty, 1.0, total)))",
        "lse = tl.where(empty, nothing, high + tl.log2(tl.where(empty, 1.0, total)))",
        "the fused merge gives lse in log2",
        "kernels/test_kernels.py::test_triton_kernels_in_the_interpreter",
    ),
    Fault(
        "kernels/chunked.py",
        "dk = _transposed(dscores) @ q + chunks.to_end * (v @ _transposed(dafter))",
        "dk = _transposed(dscores) @ q + chunks.from_start * (v @ _transposed(dafter))",
        "gradients of keys decay from the wrong end of a chunk",
        "kernels/test_linear_kernels.py::test_chunked_kernel",
    ),
    # algorithms
    Fault(
        "algorithms/ring_routes.py",
        "hops = (query - key) % self.size",
        "hops = (key - query) % self.size",
        "rings turn the other way: right results, more bytes",
        "core/test_plan.py::test_contiguous_ring_with_a_causal_mask",
    ),
    Fault(
        "algorithms/distflash.py",
        "elif self.helping and 2 * distance > self.size:",
        "elif self.helping and 2 * distance >= self.size:",
        "the last step of an even number of ranks is the helpers'",
        "algorithms/test_distflash.py::test_eight_ranks_do_what_figure_1_shows",
    ),
    Fault(
        "algorithms/point_to_point.py",
        "return min(2, self.topology.size - 1)",
        "return 1",
        "blocks of others have one slot too few",
        "core/test_execute.py::test_copy_engines_are_used_where_each_rank_has_one_peer_at_a_time",
    ),
    Fault(
        "core/execute.py",
        "            if exchange.receives:\n                work.settle()\n",
        "",
        "a partial that came is overwritten before it is merged",
        "algorithms/test_collective_conformance.py::test_one_token_a_chunk_and_less",
    ),
    Fault(
        "core/collective.py",
        "        if heads.first:\n            self.sums",
        "        if True:\n            self.sums",
        "gradients of shared keys are those of the last group of heads",
        "algorithms/test_collective_conformance.py::test_groups_of_heads",
    ),
    Fault(
        "core/team.py",
        "of_rows = outs[:, :, here], lses[..., here]",
        "of_rows = outs[:, :, outs.shape[2] - here.stop :], lses[..., here]",
        "padding is taken for tokens",
        "algorithms/test_collective_conformance.py::test_every_grid",
    ),
    Fault(
        "algorithms/lasp.py",
        "return torch.stack([gradient, *parts]).sum(0)",
        "return torch.stack(parts).sum(0)",
        "the first rank leaves its own gradient of the final state out",
        "test_linear_conformance.py::test_equals_the_recurrence",
    ),
    Fault(
        "core/linear.py",
        "self.documents[after] > stop",
        "self.documents[after] >= stop",
        "a state goes on into a document that begins where a run begins",
        "test_linear_conformance.py::test_a_state_begins_anew_at_each_document",
    ),
    Fault(
        "core/linear_runs.py",
        "documents[-1].state for",
        "documents[0].state for",
        "the state of a run's first document goes on, not that of its last one",
        "test_linear_conformance.py::test_a_state_begins_anew_at_each_document",
    ),
    Fault(
        "core/rows.py",
        "slice(other + start - low, other + stop - low)",
        "slice(other, other + stop - start)",
        "rows are taken from the beginning of a range",
        "test_touched_rows.py::test_bytes_are_those_of_tokens_that_are_seen",
    ),
    Fault(
        "core/team.py",
        "                target.copy_(whole)\n",
        "",
        "results for own rows that do not travel are lost",
        "test_touched_rows.py::test_bytes_are_those_of_tokens_that_are_seen",
    ),
    # integration
    Fault(
        "integration/batch.py",
        "self.spans = _spans_of(",
        "self.spans = self.spans or _spans_of(",
        "a model goes on with the spans of the first batch",
        "integration/test_spans_in_megatron.py::test_the_model_gets_the_spans_of_its_batch",
    ),
    Fault(
        "integration/rope.py",
        "positions = given.to(angles.device)[positions]",
        "positions = given.to(angles.device)[: len(positions)]",
        "every rank has the rotary positions of the first tokens",
        "integration/test_spans_in_megatron.py::test_equals_a_mask_of_all_pairs",
    ),
    Fault(
        "integration/rope.py",
        "torch.bucketize(positions, starts, right=True)",
        "torch.bucketize(positions, starts)",
        "the first token of a document has an angle of the one before",
        "integration/test_layout_in_megatron.py::test_positions_count_from_the_beginning_of_a_document",
    ),
    Fault(
        "integration/loss.py",
        "factor = group.size() * torch.clamp(tokens, min=1)",
        "factor = torch.clamp(tokens, min=1)",
        "the loss is too small by the number of ranks",
        "integration/test_loss.py::test_gradients_of_the_ranks_average_to_those_of_the_sequence",
    ),
    Fault(
        "integration/multi_token.py",
        "following[..., [start - 1 for start in documents]] = 0",
        "following[..., list(documents)] = 0",
        "the last token of a document predicts the next document",
        "integration/test_multi_token.py::test_nothing_follows_the_end_of_a_document",
    ),
    Fault(
        "integration/attention.py",
        "self._window = window_of(config.window_size) if windowed else None",
        "self._window = window_of(config.window_size)",
        "layers that see all get the window too",
        "integration/test_attention.py::test_window_of_megatrons_layers",
    ),
    Fault(
        "integration/checks.py",
        "return None if left == -1 else left + 1",
        "return None if left == -1 else left",
        "Megatron's windows are one token too narrow",
        "integration/test_attention.py::test_window_of_megatrons_layers",
    ),
    Fault(
        "integration/checks.py",
        "    if right != 0 or left < -1:\n",
        "    if left < -1:\n",
        "windows that look ahead are no longer refused",
        "integration/test_attention.py::test_what_it_cannot_compute_is_refused_when_built",
    ),
    Fault(
        "integration/batch.py",
        "if (mark.key, mark.version) == (key, _version(tensor)) else None",
        "if mark.key == key else None",
        "tokens that were changed after they were cut are no longer refused",
        "integration/test_foreign_batches.py::test_a_batch_that_was_cut_otherwise_is_refused",
    ),
    Fault(
        "integration/gated_norm.py",
        "    if group.size() > 1:\n        dist.all_reduce(total, group=group)\n",
        "",
        "the gated norm is that of the rank's own heads",
        "integration/test_gated_norm.py::test_heads_split_among_ranks",
    ),
    Fault(
        "integration/recompute.py",
        "return original(Checkpointed(function), *args)",
        "return original(function, *args)",
        "checkpoints run attention twice",
        "integration/test_recompute.py::test_each_checkpoint_gets_a_function_of_its_own",
    ),
)

"""Stress of the peer transport: random calls, delays and streams, compared to the bit.

    torchrun --nproc-per-node 2 tests/stress_transport.py --minutes 9 --seed 0
    torchrun --nproc-per-node 4 --no-python bash -c 'export NCCL_HOSTID=$((RANK / 2))
        LOCAL_RANK=$((RANK % 2)); python tests/stress_transport.py'  # two nodes, on two GPUs
    torchrun --nproc-per-node 4 tests/stress_transport.py --one-gpu 4  # of one node; 2: of two
    python tests/stress_transport.py --virtual 3 --minutes 0.1

Rounds of several calls back to back, forwards and backwards of different algorithms mixed, each on
a random stream behind random delays, other ones on each rank. Every result must be that of the same
call over the process group (attention2d, and on several nodes: over peer memory), made before
without delays. Some calls are captured in CUDA graphs and replayed, behind delays and between other
calls. Ranks of several nodes make calls with documents alone, whose messages go by copy engines
inside nodes. `--virtual` does the same on threads of one process, whose slots are poisoned
(core.communication.virtual), and needs no GPU.

Prints wrong results and one line at the end; exits 1 if there is a wrong element, or no case ran.
"""

import argparse
import faulthandler
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.core.kernel import Problem
from megatron_cp_plugin.errors import ConfigError, KernelUnavailableError
from megatron_cp_plugin.kernels import resolve
from tests.peer_world import run_virtual, share_gpu

NAMES = ("out", "dq", "dk", "dv")
HEADS = ((8, 8), (8, 4), (8, 2), (8, 1), (16, 4), (12, 6), (4, 4))
HEAD_DIMS = (64, 128)
# Of the whole run, beyond --minutes; what hangs longer than that does not end by itself.
GRACE_S = 45
DELAY_CYCLES = 4_000_000
DELAY_S = 0.003
REPLAYED_INPUTS = 4
CAPTURE_EVERY = 20  # rounds
REPLAYS = 20  # of each captured call


@dataclass(frozen=True)
class Call:
    """One attention, forward and backward.

    Attributes: tokens: of a rank. seed: of its inputs. cuts: where documents end, as parts of the
        sequence; (): one document.
    """

    algo: str
    options: tuple[tuple[str, object], ...]
    kernel: str
    causal: bool
    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    seed: int
    cuts: tuple[float, ...] = ()

    def transport(self, wanted: str) -> str:
        """Grids gather over the process group, and push blocks in another order over peer memory:
        so one always does the one, the other the other. With documents ranks may have two peers at
        a time, which peer memory does not support.
        """
        if wanted == "peer" and self.cuts:
            wanted = "auto"
        return {"allgather": "group", "attention2d": "auto"}.get(self.algo, wanted)


def draw(random: Random, kernels: Sequence[str], shortest: int, longest: int) -> Call:
    """A random call whose blocks visit every rank, so that they can travel over peer memory."""
    heads, kv_heads = random.choice(HEADS)
    algo = random.choice(
        ("zigzag", "zigzag", "distflash", "distflash", "ring", "allgather", "attention2d")
        if random.random() < 0.75
        else ("ulysses", "usp")
    )
    options: dict[str, object] = {}
    if algo in ("zigzag", "ring"):
        options["backward"] = random.choice(("kv", "query", "auto"))
        options["gradients"] = random.choice(("float32", "model"))
        options["chunks"] = random.choice((1, 2))
    elif algo == "distflash":
        options["helpers"] = random.choice(("work", "work", "work", "none"))
        options["last_step"] = random.choice(("shared", "owner"))
        options["chunks"] = random.choice((1, 2))
    else:
        options["chunks"] = random.choice((1, 2))
    if algo in ("ulysses", "usp"):
        options["keep"] = random.choice(("exchanged", "local"))
    if algo == "usp":
        options["ulysses"] = 2
    if algo == "attention2d":
        options["rows"] = random.choice((0, 1))
    cuts = sorted(random.random() for _ in range(random.choice((0, 0, 1, 4, 12))))
    if cuts and algo == "zigzag" and random.random() < 0.5:
        options["layout"] = "documents"
    return Call(
        algo,
        tuple(options.items()),
        random.choice(kernels),
        causal=algo != "ring" and random.random() < 0.7,
        batch=random.choice((1, 1, 2)),
        tokens=2 * random.randint(shortest // 2, longest // 2),  # of which zigzag makes two chunks
        heads=heads,
        kv_heads=kv_heads,
        head_dim=random.choice(HEAD_DIMS),
        seed=random.getrandbits(32),
        cuts=tuple(cuts),
    )


class Stress:
    """One rank's part of a run."""

    def __init__(
        self,
        topology: Topology,
        device: torch.device,
        *,
        seed: int,
        kernels: Sequence[str],
        shortest: int,
        longest: int,
    ) -> None:
        self.topology = topology
        self.device = device
        self.cuda = device.type == "cuda"
        # What all ranks draw alike, and what each draws for itself.
        self.random = Random(seed)
        self.own = Random(f"{seed} {topology.rank}")
        self.kernels, self.lengths = kernels, (shortest, longest)
        self.report = Counter[str]()
        self.control = topology.channel("control")
        self.several_nodes = len(set(topology.nodes)) > 1
        self.sides = [torch.cuda.Stream() for _ in range(2)] if self.cuda else []

    def run(self, deadline: float, rounds: int | None = None) -> Counter[str]:
        """Rounds until the time is over on rank 0 (of `time.monotonic`), or `rounds`."""
        while self.report["rounds"] != rounds and self._goes_on(time.monotonic() < deadline):
            self.round()
            if self.cuda and self.report["rounds"] % CAPTURE_EVERY == 1:
                self.capture()
            self.report |= Counter({"peer bytes": self.topology.peer_bytes})
            if self.cuda and self.report["rounds"] % 100 == 0:
                self._release()
        return self.report

    def round(self) -> None:
        """Several calls in flight at once, then the comparison of all."""
        calls = [self.draw() for _ in range(self.random.randint(1, 4))]
        inputs = [self.inputs(call) for call in calls]
        expected = [self.quiet(call, given) for call, given in zip(calls, inputs, strict=True)]
        ready = None
        if self.cuda:
            ready = torch.cuda.Event()
            ready.record()
        outs: dict[int, tuple[Tensor, list[Tensor]]] = {}
        got: dict[int, tuple[Tensor, ...]] = {}
        for index, backward in self.order(len(calls)):
            with self.anywhere(ready):
                if backward:
                    out, leaves = outs[index]
                    gradients = torch.autograd.grad(out, leaves, inputs[index][3])
                    got[index] = (out.detach(), *gradients)
                else:
                    leaves = [x.detach().requires_grad_() for x in inputs[index][:3]]
                    outs[index] = self.attend(calls[index], leaves, "peer"), leaves
        self._synchronize()
        for index, call in enumerate(calls):
            self.compare(call, expected[index], got[index])
        self.report["rounds"] += 1

    def order(self, count: int) -> Iterator[tuple[int, bool]]:
        """(call, whether its backward) in an order that all ranks draw alike."""
        waiting = list(range(count))
        running: list[int] = []
        while waiting or running:
            if waiting and (not running or self.random.random() < 0.6):
                running.append(waiting.pop(0))
                yield running[-1], False
            else:
                yield running.pop(self.random.randrange(len(running))), True

    def draw(self) -> Call:
        while True:
            call = draw(self.random, self.kernels, *self.lengths)
            gathers = call.algo in ("allgather", "attention2d")
            if call.algo == "usp" and self.topology.size % 2:
                continue
            if not self.several_nodes or (call.cuts and not gathers):
                return call

    def inputs(self, call: Call) -> list[Tensor]:
        """q, k, v, dout of this rank."""
        seed = (call.seed << 8) + self.topology.rank
        generator = torch.Generator(self.device).manual_seed(seed)
        dtype = torch.bfloat16 if self.cuda else torch.float32
        heads = (call.heads, call.kv_heads, call.kv_heads, call.heads)
        return [
            torch.randn(
                (call.batch, call.tokens, h, call.head_dim),
                generator=generator,
                device=self.device,
                dtype=dtype,
            )
            for h in heads
        ]

    def attend(self, call: Call, leaves: Sequence[Tensor], transport: str) -> Tensor:
        options = dict(call.options)
        options["transport"] = call.transport(transport)
        q, k, v = leaves
        seq_len = call.tokens * self.topology.size
        bounds = [0, *(int(cut * seq_len) for cut in call.cuts), seq_len]
        return cp.attention(
            q,
            k,
            v,
            algo=call.algo,
            group=self.topology,
            causal=call.causal,
            kernel=call.kernel,
            seq_len=seq_len,
            cu_seqlens=bounds if call.cuts else None,
            **options,
        )

    def quiet(self, call: Call, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """(out, dq, dk, dv) over the process group, or over peer memory without delays, where
        results are summed in another order.
        """
        leaves = [x.detach().requires_grad_() for x in given[:3]]
        out = self.attend(call, leaves, "peer" if self.several_nodes else "group")
        return (out.detach(), *torch.autograd.grad(out, leaves, given[3]))

    def compare(
        self, call: Call, expected: Sequence[Tensor], got: Sequence[Tensor], how: str = "peer"
    ) -> None:
        """Counts the elements that are not the same bits, or not numbers."""
        self.report["cases"] += 1
        for name, want, have in zip(NAMES, expected, got, strict=True):
            bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[want.element_size()]
            differ = want.contiguous().view(bits) != have.contiguous().view(bits)
            wrong = int((differ | ~have.isfinite()).sum())
            if wrong:
                self.report["wrong elements"] += wrong
                where = f"rank {self.topology.rank} round {self.report['rounds']} {how} {name}"
                print(f"WRONG {where}: {wrong} of {want.numel()}: {call}", flush=True)

    def anywhere(self, ready: "torch.cuda.Event | None") -> AbstractContextManager[object]:
        """A random stream of this rank's own choice, with delays before what is queued next."""
        if self.own.random() < 0.3:
            time.sleep(self.own.random() * DELAY_S)
        if not self.cuda:
            return nullcontext()
        streams = [torch.cuda.default_stream(), *self.sides]
        self.delay([*streams, *self._copying()])
        chosen = self.own.choice(streams)
        assert ready is not None
        chosen.wait_event(ready)
        return torch.cuda.stream(chosen)

    def delay(self, streams: Sequence["torch.cuda.Stream"]) -> None:
        """Lets this rank's GPU come late, on some of the streams."""
        for stream in streams:
            if self.own.random() < 0.3:
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self.own.randrange(10_000, DELAY_CYCLES))

    def _copying(self) -> list["torch.cuda.Stream"]:
        streams = (getattr(c, "_stream", None) for c in self._peer_channels())
        return [stream for stream in streams if stream is not None]

    def capture(self) -> None:
        """A call that is captured once and replayed with other inputs, between other calls."""
        call = self.draw()
        transport = self.random.choice(("peer", "peer", "group"))
        given = self.inputs(call)
        leaves = [x.detach().clone().requires_grad_() for x in given[:3]]
        dout = given[3].clone()

        def step() -> tuple[Tensor, ...]:
            out = self.attend(call, leaves, transport)
            return (out.detach(), *torch.autograd.grad(out, leaves, dout))

        graph, results = capture(step, self._meet)
        given = [self.inputs(replace(call, seed=call.seed + n)) for n in range(REPLAYED_INPUTS)]
        expected = [self.quiet(call, other) for other in given]
        torch.cuda.synchronize()
        for _ in range(REPLAYS):
            index = self.random.randrange(REPLAYED_INPUTS)
            between = self.random.random() < 0.3
            with torch.no_grad():
                for target, x in zip((*leaves, dout), given[index], strict=True):
                    target.copy_(x)
            for x in results:
                x.fill_(float("nan"))
            self.delay([torch.cuda.default_stream(), *self._copying()])
            graph.replay()
            copies = [x.clone() for x in results]
            eager = step() if between else ()
            torch.cuda.synchronize()
            self.compare(call, expected[index], copies, f"replayed over {transport}")
            if eager:
                self.compare(call, expected[index], eager, f"between replays over {transport}")
            self.report["replays"] += 1
        graph.reset()
        self.report["captured"] += 1

    def _goes_on(self, mine: bool) -> bool:
        flag = torch.tensor([int(mine)], device=self.device)
        return bool(self.control.all_gather(flag).wait()[0].item())

    def _peer_channels(self) -> list[object]:
        return list(self.topology._peer_channels.values())

    def _release(self) -> None:
        """Receive buffers are made anew."""
        self._meet()
        cp.release()
        self._meet()

    def _synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _meet(self) -> None:
        """All ranks have come here, and their GPUs have finished."""
        self._synchronize()
        self._goes_on(True)
        self._synchronize()


def serving(kernels: Sequence[str], device: torch.device) -> list[str]:
    """Those of the kernels that serve all problems here."""
    found = []
    for kernel in kernels:
        try:
            for heads, kv_heads in HEADS:
                for dim in HEAD_DIMS:
                    resolve(kernel, Problem(device, torch.bfloat16, heads, kv_heads, dim))
        except KernelUnavailableError as error:
            print(f"without {kernel}: {error}", flush=True)
        else:
            found.append(kernel)
    if not found:
        raise ConfigError(f"stress needs a kernel that serves all problems, got {kernels}")
    return found


def conclude(reports: Sequence[Counter[str]], args: argparse.Namespace, seconds: float) -> int:
    """One line of all ranks, which the first one prints; the exit status."""
    found, wrong = reports[0], sum(report["wrong elements"] for report in reports)
    problems = [f"{wrong} wrong elements"] if wrong else []
    if not found["cases"] or not min(report["peer bytes"] for report in reports):
        problems.append("no case ran over peer memory")
    if not args.virtual and not found["replays"]:
        problems.append("no CUDA graph was replayed")
    if os.environ.get("RANK", "0") != "0":
        return bool(problems)
    print(
        f"stress: {found['cases']} cases in {found['rounds']} rounds on {len(reports)} ranks, "
        f"{found['captured']} captured, {found['replays']} replays, {seconds:.0f} s: "
        f"{'; '.join(problems) or '0 wrong elements'}",
        flush=True,
    )
    return bool(problems)


def on_threads(args: argparse.Namespace, deadline: float) -> list[Counter[str]]:
    torch.set_num_threads(1)

    def body(topology: Topology) -> Counter[str]:
        settings = {"kernels": ["auto"], "shortest": 8, "longest": 64}
        stress = Stress(topology, torch.device("cpu"), seed=args.seed, **settings)
        return stress.run(deadline, args.rounds)

    return run_virtual(args.virtual, body, peer_access=True)


def on_gpus(args: argparse.Namespace, deadline: float) -> list[Counter[str]]:
    """What hangs ends with a traceback."""
    faulthandler.dump_traceback_later(60 * args.minutes + GRACE_S, exit=True)
    if args.one_gpu:
        share_gpu(args.one_gpu)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    # Kernels whose results repeat; torch would also fill what is not written yet, which takes time.
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    dist.init_process_group("nccl", timeout=timedelta(minutes=3))
    topology = topology_of(None)
    if topology.near is None:
        raise ConfigError("stress needs GPUs with access to each other's memory, got none")
    settings = {"shortest": args.shortest, "longest": args.longest}
    settings["kernels"] = serving(args.kernels.split(","), device)
    stress = Stress(topology, device, seed=args.seed, **settings)
    report = stress.run(deadline, args.rounds)
    reports = [report] * topology.size
    dist.all_gather_object(reports, report)
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    return reports


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=9.0, help="of the whole run")
    parser.add_argument("--rounds", type=int, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", default="torch_flash,flash4,auto")
    parser.add_argument("--shortest", type=int, default=512, help="tokens of a rank, at least")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a rank, at most")
    parser.add_argument("--virtual", type=int, metavar="P", help="threads in place of GPUs")
    parser.add_argument("--one-gpu", type=int, metavar="N", help="N ranks a node, all on one GPU")
    args = parser.parse_args(argv)
    began = time.monotonic()
    run = on_threads if args.virtual else on_gpus
    reports = run(args, began + 60 * args.minutes)
    return conclude(reports, args, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())

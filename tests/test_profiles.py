"""What the benchmarks read from a profile."""

import pytest
from profiles import by_class, class_of, computing, gaps, longest

SPANS = [
    ("flash_fwd", 0.0, 4000.0),
    ("ncclDevKernel_SendRecv", 1000.0, 6000.0),
    ("nvjet_sm90_tst", 3000.0, 5000.0),
    ("Memcpy PtoP (Device -> Device)", 6000.0, 7000.0),
    ("flash_fwd", 8000.0, 10000.0),
]


def test_time_in_which_nothing_computes_is_waiting():
    assert computing(SPANS) == (7000.0, 10000.0)
    found = by_class(SPANS)
    assert found.pop("waiting") == 3.0
    expected = {"attention": 6.0, "communication": 5.0, "matrix products": 2.0, "copies": 1.0}
    assert found == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("kernel_cutlass_kernel_flash_attncute_flash_bwd_sm90", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma", "attention"),
        ("nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        ("void at::native::vectorized_elementwise_kernel", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name, expected):
    assert class_of(name) == expected


def test_the_longest_come_first():
    lines = longest(SPANS, count=2)
    assert [line.split() for line in lines] == [
        ["6.000", "2", "flash_fwd"],
        ["5.000", "1", "ncclDevKernel_SendRecv"],
    ]


def test_gaps_name_what_is_around_them():
    (line,) = gaps(SPANS)
    assert line.split(maxsplit=2) == [
        "3.000",
        "1",
        "nvjet_sm90_tst -> flash_fwd beside communication, copies",
    ]

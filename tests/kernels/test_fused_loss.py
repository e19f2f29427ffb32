"""Fused statistics and gradients of logits, in Triton's interpreter.

That they compile for GPUs is tested with the other kernels, in test_fused.py.
"""

from tests.kernels.test_fused import interpret

LOGITS = """
import torch
from megatron_cp_plugin.kernels import fused

torch.manual_seed(0)
from megatron_cp_plugin.core import chunked_loss

for columns in (5, 4096, 9000):
    logits = (torch.randn(4, columns + 3) * 9).bfloat16()[:, :columns]
    logits[1, : columns // 2] = -torch.inf
    wanted, dloss = torch.tensor([columns - 1, columns - 2, -1, columns]), torch.randn(4)
    for scale in (None, torch.rand(4) + 0.5):
        for entropy in (False, True):
            given = wanted, scale, entropy
            found = fused.logit_statistics(logits, *given)
            for x, y in zip(found, chunked_loss.logit_statistics(logits, *given), strict=True):
                torch.testing.assert_close(x, y)
            got, want = logits.clone(), logits.clone()
            of_entropy = (found[2], torch.randn(4)) if entropy else (None, None)
            fused.logit_gradients_(got, wanted, found[0], dloss, scale, *of_entropy)
            chunked_loss.logit_gradients_(want, wanted, found[0], dloss, scale, *of_entropy)
            torch.testing.assert_close(got, want)
"""


def test_against_the_loss_in_chunks():
    interpret(LOGITS)

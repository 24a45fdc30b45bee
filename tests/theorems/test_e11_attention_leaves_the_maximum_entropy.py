"""max { -KL(p‖h) : E_p x = u } = min_eta G(eta) - <eta, u>, attained by the member of the family.   [theory E11, 3.5]

The paper calls this the dual problem of attention. It is dual to the function G, but attention ascends G itself, while
the dual problem descends G(eta) - <eta, u>.
"""

import torch

import gradlogz as gz

STATEMENTS = ("E11",)


def test_a_step_of_attention_leaves_the_optimum_of_the_dual_problem():
    keys = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]], dtype=torch.float64)
    h, u = gz.Empirical(keys), keys.mean(0)
    eta = gz.measures.maximum_entropy(h, u).eta
    stepped = eta + h.mean(eta)
    assert float(h.log_normalizer(stepped)) > float(h.log_normalizer(eta)) + 1.0  # up G ...
    objective = [float(h.log_normalizer(e) - e @ u) for e in (eta, stepped)]
    assert objective[1] > objective[0] + 0.1  # ... and away from the minimum of G(eta) - <eta, u>

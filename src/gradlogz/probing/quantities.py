"""What is on an axis: unit and formula of every quantity that is measured.

A name that is not here is looked for without what stands behind its first comma, then without what was left out: "gain,
permuted" is a gain, "excess of log trace without first tokens" an excess of log trace. A quantity of a prediction that
nobody knows is a number.

Read next: figures.py, which labels axes with them; the heads of predictions/*.py, where the letters are explained.
"""

QUANTITIES: dict[str, dict[str, tuple[str, str]]] = {
    "identity": {"error": ("units of rounding", "|y − ∇G| / (ε (1 + max|s|) max|v|)")},
    "ascent": {
        "gain": ("1", "ΔG(D) / ΔG(|D| ∇G/|∇G|)"),
        "gain, permuted": ("1", "ΔG(D of another token) / ΔG(|D| ∇G/|∇G|)"),
        "gain, reversed": ("1", "ΔG(−D) / ΔG(|D| ∇G/|∇G|)"),
        "gain, random": ("1", "ΔG(random, |D| long) / ΔG(|D| ∇G/|∇G|)"),
        "share of tokens that rise": ("share of tokens", "P(ΔG(D) > 0)"),
    },
    "tie": {
        "cosine": ("1", "cos(W_v W_o, W_k W_qᵀ)"),
        "weighted cosine": ("1", "cos(W_v W_o, W_k W_qᵀ), weighted by Cov(x)"),
        "cosine of the layer": ("1", "cos(W_v W_o, W_k W_qᵀ), all heads"),
        "share that does not turn": ("1", "|M_s|² / (|M_s|² + |M_t|²),  coordinates that stay and turn"),
    },
    "qk_geometry": {
        "positive cosine": ("1", "|B₊| / |B|,  B = β W_q W_kᵀ"),
        "symmetric share": ("1", "|B + Bᵀ|² / 4|B|²"),
        "positive share": ("1", "Σ λ₊ / Σ |λ|,  λ of (B + Bᵀ)/2"),
        "cosine with the identity": ("1", "cos((B + Bᵀ)/2, I)"),
        "cosine with the covariance": ("1", "cos((B + Bᵀ)/2, C)"),
        "cosine with the inverse covariance": ("1", "cos((B + Bᵀ)/2, C⁻¹)"),
        "whitened cosine with the inverse covariance": ("1", "cos(C^½ (B + Bᵀ)/2 C^½, I)"),
        "cosine with the Fisher information": ("1", "cos(W_kᵀ (B + Bᵀ)/2 W_k, E Cov_a(k))"),
        "share that does not turn": ("1", "|M_s|² / (|M_s|² + |M_t|²),  coordinates that stay and turn"),
    },
    "symmetry": {
        "symmetry": ("1", "tr M² / tr M Mᵀ,  M = W_q W_kᵀ"),
        "directionality": ("1", "(r − c) / (r + c),  rows and columns of M"),
        "symmetry of the head": ("1", "tr M² / tr M Mᵀ,  M = W_q W_kᵀ"),
        "share that does not turn": ("1", "|M_s|² / (|M_s|² + |M_t|²),  coordinates that stay and turn"),
    },
    "gaussian_measure": {
        "mean explained": ("1", "1 − Σ|m − μ − Σq|² / Σ|m − μ|²"),
        "mean cosine": ("1", "⟨m − μ, Σq⟩ / |m − μ| |Σq|"),
        "log normalizer explained": ("1", "1 − Σ(g − ⟨q, Σq⟩/2)² / Σg²,  g = G − log n − ⟨μ, q⟩"),
        "log normalizer R²": ("1", "1 − Σ(g − ⟨q, Σq⟩/2)² / Σ(y − ȳ)²,  y = G − log n"),
        "log normalizer correlation": ("1", "corr(G − log n, ⟨μ, q⟩ + ⟨q, Σq⟩/2)"),
        "information": ("nats", "log n − H"),
        "frozen": ("share of rows", "P(Var u > 2 log n)"),
        "pooled mean explained": ("1", "1 − E|m − μ − Σq|² / E|m − μ|²,  all texts"),
        "within position mean explained": ("1", "1 − E|m − μ − Σq|² / E|m − μ|²,  Σ within positions"),
        "position share": ("1", "1 − tr Σ within / tr Σ pooled"),
    },
    "expansion": {
        "growth of log trace": ("nats", "log tr Cov(x + u) − log tr Cov(x)"),
        "excess of log trace": ("nats", "log tr Cov(x + u) − log(tr Cov(x) + tr Cov(u))"),
        "excess of log trace of the feed-forward": ("nats", "log tr Cov(x + u) − log(tr Cov(x) + tr Cov(u))"),
        "growth of log det": ("nats per direction", "(log det Cov(x + u) − log det Cov(x)) / k"),
        "excess of log det": ("nats per direction", "(log det Cov(x + u) − log det(Cov(x) + Cov(u))) / k"),
    },
    "gaussianity": {
        "mean fraction": ("1", "|E x|² / E|x|²"),
        "tokens with massive activations": ("share of tokens", "P(|a| > 100 and > 1000 × median)"),
        "self weight": ("weight", "aᵢᵢ"),
        "largest Wasserstein": ("standard deviations", "√max W²(z·u, N(0,1))"),
        "sliced Wasserstein": ("standard deviations", "√E_u W²(z·u, N(0,1))"),
        "Wasserstein of principal axes": ("standard deviations", "√E_i W²(zᵢ, N(0,1))"),
        "Wasserstein of random projections": ("standard deviations", "√E_p W²(x·p, N(0,1))"),
        "Anderson-Darling": ("1", "A² / n"),
        "logistic against normal": ("nats per token", "(log L_logistic − log L_normal) / n"),
        "skewness": ("1", "E (zᵢ·zⱼ)³"),
        "kurtosis": ("1", "E|z|⁴ − d(d + 2)"),
        "excess": ("variance of z", "max W² − that of Gaussian clouds"),
    },
    "linearity": {
        "held-out R²": ("1", "1 − |u − Az − b|² / |u − ū|²,  held out"),
        "held-out R² with residual": ("1", "1 − |x′ − Ax − b|² / |x′ − x̄′|²,  held out"),
        "R² of the identity": ("1", "1 − tr Cov(u) / tr Cov(x + u)"),
        "in-sample R²": ("1", "1 − |u − Az − b|² / |u − ū|²"),
        "in-sample R² of the middle coordinate": ("1", "1 − |uᵢ − (Az + b)ᵢ|² / |uᵢ − ūᵢ|²"),
        "linearity score": ("1", "1 − min_A |X̃A − X̃′|²"),
        "distance to the identity": ("1", "|B − I|_C / |I|_C"),
        "anisotropy": ("1", "λ₁ / Σ λ,  λ of Cov(x)"),
    },
    "entropy": {
        "entropy": ("share of log n", "H / log n"),
        "logit variance": ("nats²", "Σ p (s − E)²"),
        "max logit": ("nats", "max s"),
        "log normalizer": ("nats", "G"),
        "sink": ("weight", "a₀"),
        "learned sink": ("weight", "a_sink"),
        "high logits": ("share of rows", "P(max s > 100)"),
        "entropy of the layer": ("share of log n", "H / log n"),
        "heads with a sink": ("share of heads", "P(E a₀ > 0.3)"),
        "logit rank": ("dimensions", "tr(A)² / tr(A²),  A = E[q qᵀ] Cov(k)"),
    },
    "pair_energy": {
        "log pair energy": ("nats", "log Σᵢⱼ exp⟨uᵢ, uⱼ⟩,  u = x / |x|"),
        "log pair energy, beta sqrt(D)": ("nats", "log Σᵢⱼ exp(√D ⟨uᵢ, uⱼ⟩),  u = x / |x|"),
        "log pair energy of logits": ("nats", "log Σᵢ exp Gᵢ − 2 log n"),
        "change": ("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over a block"),
        "change by attention": ("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over attention"),
        "change over depth": ("nats", "Δ log Σᵢⱼ exp⟨uᵢ, uⱼ⟩ over all blocks"),
        "sequences that rise": ("share of sequences", "P(Δ log E > 0)"),
        "share of steps that rise": ("share of steps", "P(Δ log E > 0)"),
        "log normalizer": ("nats", "Σᵢ Gᵢ / n"),
        "mean fraction": ("1", "|E x|² / E|x|²"),
        "rank-one residual": ("1", "|X − 1 x̄ᵀ| / |X|"),
        "clusters": ("count", "linked at 5 % of √E|x|²"),
        "effective rank": ("dimensions", "exp H(λ / Σλ),  λ of Cov(x)"),
    },
    "dropped_covariance": {
        "partial correlation": ("1", "corr(log Σ_h tr P, loss | log n)"),
        "correlation": ("1", "corr(log Σ_h tr P, loss)"),
        "correlation with pseudo-loss": ("1", "corr(log Σ_h tr P, loss of seen tokens)"),
    },
    "coherence": {
        "cost": ("nats", "KL(uniform‖softmax_k(G_k − ⟨μ_k, q_k⟩))"),
        "raw cost": ("nats", "KL(uniform‖softmax_k(G_k))"),
    },
    "hopfield": {
        "held": ("share of keys", "k / n,  k keys hold 90 %"),
        "keys held": ("keys", "k that hold 90 %"),
        "class": ("number", "1: k > n/2,  2: > n/8,  3: > n/32,  4: rest"),
        "class I": ("share of rows", "P(k > n/2)"),
        "class II": ("share of rows", "P(n/8 < k ≤ n/2)"),
        "class III": ("share of rows", "P(n/32 < k ≤ n/8)"),
        "class IV": ("share of rows", "P(k ≤ n/32)"),
        "retrieval": ("share of rows", "P(2M (n − 1) exp(s₂ − s₁) < |k₁|)"),
        "rows against theorems": ("rows", "count of rows"),
    },
}


def unit_and_formula(prediction: str, quantity: str) -> tuple[str, str]:
    """Of a quantity, by the name it has in findings; a bare number if nobody knows it."""
    known = QUANTITIES.get(prediction, {})
    for name in (quantity, quantity.partition(",")[0], quantity.partition(" without ")[0]):
        if name in known:
            return known[name]
    return "1", ""

"""Default corpus for chemistry models: textbook reactions assembled from fragments.

    amide    O=C(O)R + NS >> O=C(NS)R          ester    O=C(O)R + OS >> O=C(OS)R        ether    OR + BrS >> O(R)S
    amine    O=CR + NS >> C(R)NS               sulfonamide    O=S(=O)(Cl)R + NS >> O=S(=O)(NS)R
    hydrolysis, reduction, deprotection: one fragment each

R and S run through fragments that are attached by their first atom. Reagents and solvents are listed with the
reactants, as in patents. The SMILES are valid but not canonical, and the products are those of a textbook: enough to
demonstrate a model, not to evaluate it. Pass your own reactions for an evaluation.

Read next: text.py.
"""

from collections.abc import Iterator

ALKYL = ("C", "CC", "CCC", "CCCC", "CC(C)C", "CC1CC1", "CC1CCCCC1", "CCOC", "CCCCl", "CC(F)(F)F", "CCC#N", "CCC(C)C")
BENZYL = tuple(f"C{ring}" for ring in ("c1ccccc1", "c1ccc(F)cc1", "c1ccc(OC)cc1", "c1cccnc1", "c1ccco1", "c1cccs1"))
ARYL = (
    "c1ccccc1",
    "c1ccc(C)cc1",
    "c1ccc(F)cc1",
    "c1ccc(Cl)cc1",
    "c1ccc(Br)cc1",
    "c1ccc(OC)cc1",
    "c1ccc(C#N)cc1",
    "c1cccc(C(F)(F)F)c1",
    "c1ccncc1",
    "c1cccnc1",
    "c1ccc2ccccc2c1",
    "c1ccc([N+](=O)[O-])cc1",
)
EVERY = ALKYL + BENZYL + ARYL

PAIRS = {  # reactants, reagents, product, fragments for R, fragments for S
    "amide": ("O=C(O){R}.N{S}", "CCN(CC)CC.ClCCl", "O=C(N{S}){R}", EVERY, EVERY),
    "ester": ("O=C(O){R}.O{S}", "O=S(=O)(O)O", "O=C(O{S}){R}", EVERY, ALKYL + BENZYL),
    "ether": ("O{R}.Br{S}", "CN(C)C=O.O=C([O-])[O-].[K+].[K+]", "O({R}){S}", ARYL, ALKYL + BENZYL),
    "amine": ("O=C{R}.N{S}", "ClCCl.[BH3-]C#N.[Na+]", "C({R})N{S}", ARYL, EVERY),
    "sulfonamide": ("O=S(=O)(Cl){R}.N{S}", "c1ccncc1", "O=S(=O)(N{S}){R}", ARYL, EVERY),
}
SINGLES = {
    "hydrolysis": ("O=C(OC){R}", "C1CCOC1.O.[Li+].[OH-]", "O=C(O){R}", EVERY),
    "reduction": ("O=C(OC){R}", "C1CCOC1.[AlH4-].[Li+]", "OC{R}", EVERY),
    "deprotection": ("CC(C)(C)OC(=O)N{R}", "ClCCl.O=C(O)C(F)(F)F", "N{R}", EVERY),
}


def reactions() -> Iterator[tuple[str, str]]:
    """Yield (name, SMILES) of about 2,500 reactions, 160,000 tokens in total."""
    for kind, (reactants, reagents, product, ones, others) in PAIRS.items():
        for i, one in enumerate(ones):
            for j, other in enumerate(others):
                fragments = {"R": one, "S": other}
                yield f"{kind} {i} {j}", f"{reactants.format(**fragments)}.{reagents}>>{product.format(**fragments)}"
    for kind, (reactants, reagents, product, ones) in SINGLES.items():
        for i, one in enumerate(ones):
            yield f"{kind} {i}", f"{reactants.format(R=one)}.{reagents}>>{product.format(R=one)}"

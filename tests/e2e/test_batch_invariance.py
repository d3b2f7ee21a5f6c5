"""Goal: what a request gets does not depend on who shares its steps.

Method: prompts generated alone, then together and in another order, greedy and sampled; with an
unquantised cache the tokens must be the same ones.
"""

import numpy as np

from serving import LLM, SamplingParams


def test_alone_equals_in_company(llm: LLM, rng: np.random.Generator) -> None:
    # Lengths around the window, a prefill chunk and a block, and more rows than run at once.
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 9, 64, 65, 130, 200) * 2]
    params = [
        SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        if index < 6
        else SamplingParams(max_tokens=12, temperature=1.0, top_k=20, seed=index, ignore_eos=True)
        for index in range(12)
    ]
    alone = [llm.generate([p], [s])[0].token_ids for p, s in zip(prompts, params, strict=True)]
    together = [output.token_ids for output in llm.generate(prompts, params)]
    order = rng.permutation(12).tolist()
    shuffled = llm.generate([prompts[i] for i in order], [params[i] for i in order])
    assert together == alone
    assert [output.token_ids for output in shuffled] == [alone[i] for i in order]
    assert len({tuple(tokens) for tokens in alone}) == 12

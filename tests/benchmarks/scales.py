"""Claim: the law across scales finds the power of B_crit, and its interval holds far beyond the scales.

Run as ``python tests/benchmarks/scales.py``. Each case has three scales, 4 to 8 times the data apart, and a run with
5 % noise at each of four batch sizes around B_crit, octaves to two octaves apart. Bars: p within 0.1 in 90 %; the 90 %
intervals of B_crit and of the steps, at 30 times the largest data, hold the truth in 85 to 95 %. Also printed: B_crit
within a factor 1.5, and cases without a power (B_crit ∝ D^0), which must not show growth in more than 8 %. Exits 1
below a bar.

With ``--db URL`` of the studies of ``bssearch run char_lm_scaling``, the largest scale is predicted from the others
instead. Bars: B_crit within a factor 1.5 and covered; the time of the batch size recommended for the measured step
times within 15 % of the search's best.
"""

if not __package__:
    __import__("from_clone")

import math

import numpy as np

from bssearch.analysis.law.batch_model import fit_step_time
from bssearch.analysis.law.scales import ScaledSteps, ScalingLaw, interval, left_out, plan_larger_run
from bssearch.commands.plan import scales_of
from bssearch.storage.repository import open_store
from tests.benchmarks.harness import holds, script, verdict

NOISE, FARTHER = 0.05, 30.0
POWER_ERROR, POWER_BAR = 0.1, 0.90
COVER_BAR = (0.85, 0.95)
NEAR, SLOWER = 1.5, 1.15
SHOWN_BAR = 0.08


def case(rng: np.random.Generator, power: float) -> dict[str, bool]:
    """Draw scales, fit the law, and compare with the truth."""
    first, apart = math.exp(rng.uniform(7, 9)), rng.uniform(4, 8)
    own, share = rng.uniform(2, 5), rng.uniform(0.1, 0.9)

    def b_crit(samples: float) -> float:
        return math.exp(own + power * math.log(samples / first))

    def steps(samples: float, batch_size: float) -> float:
        return 100 * math.exp((1 - share) * math.log(samples / first)) * (1 + b_crit(samples) / batch_size)

    points = []
    for samples in (first, first * apart, first * apart**2):
        smallest, ratio = math.log2(b_crit(samples)) + rng.uniform(-3, -1), rng.uniform(1, 2)
        for octaves in range(4):
            size = max(1, round(2 ** (smallest + ratio * octaves)))
            noisy = steps(samples, size) * math.exp(rng.normal(0, NOISE))
            points.append(ScaledSteps(20 * samples, samples, size, noisy))
    law = ScalingLaw(points)
    far = FARTHER * samples
    size = max(1, round(b_crit(far)))
    return {
        "power": abs(law.power.value - power) <= POWER_ERROR,
        "B_crit covered": bool(holds(law.b_crit(far), b_crit(far))),
        "steps covered": bool(holds(interval(law.steps(20 * far, far, [size])[:, 0]), steps(far, size))),
        "B_crit near": abs(math.log(law.b_crit(far).value / b_crit(far))) <= math.log(NEAR),
        "shown": law.is_shown,
    }


def searched(db: str, study: str = "char_lm_scaling") -> bool:
    """Predict the largest of a spec's stored scales from the others."""
    with open_store(db, write=False) as store:
        scales = sorted((one for _, one in scales_of(store, study)), key=lambda one: one.samples)
        *others, largest = scales
        line = fit_step_time(list(store.probes.by_batch_size(largest.answer.study).values()))
    found, plan = left_out(scales), plan_larger_run(others, largest.parameters, largest.samples, line)
    times = {row.batch_size: row.time_to_target_s.median for row in largest.answer.batches if row.time_to_target_s}
    ratio, slower = found.b_crit.value / found.b_crit_measured, times[plan.batch_size] / min(times.values())
    print(f"B_crit {found.b_crit}, measured {found.b_crit_measured:.3g}, ratio {ratio:.3g}; p = {plan.power}")
    print(f"steps predicted / measured {found.steps_ratio:.3g}; batch {plan.batch_size} takes {slower:.3g} × the best")
    return verdict(1 / NEAR <= ratio <= NEAR and bool(holds(found.b_crit, found.b_crit_measured)) and slower <= SLOWER)


def main(cases: int = 400, db: str | None = None) -> bool:
    """Print the shares of cases."""
    if db is not None:
        return searched(db)
    rng = np.random.default_rng(0)
    found = [case(rng, rng.uniform(0.3, 0.9)) for _ in range(cases)]
    shares = {name: sum(one[name] for one in found) / cases for name in found[0]}
    shares["shown without a power"] = sum(case(rng, 0.0)["shown"] for _ in range(cases)) / cases
    for name, value in shares.items():
        print(f"{name:24} {value:.1%}")
    covered = all(COVER_BAR[0] <= shares[name] <= COVER_BAR[1] for name in ("B_crit covered", "steps covered"))
    return verdict(shares["power"] >= POWER_BAR and covered and shares["shown without a power"] <= SHOWN_BAR)


if __name__ == "__main__":
    script(main, __doc__)

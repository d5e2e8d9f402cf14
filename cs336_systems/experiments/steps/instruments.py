"""Instruments that time a training step; several experiments share them."""

from cs336_systems.experiments.spec import Instrument, label_step, step_is_cold, step_memory

STEP = Instrument(
    name="step",
    measure="cs336_systems.experiments.steps.measure_step:measure_step",
    label=label_step,
    label_has_name=False,
    memory=step_memory,
    needs_fresh_process=step_is_cold,
    takes_peak_tflops=True,
)

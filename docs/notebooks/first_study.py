# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first study
#
# This notebook reads a small study and decides between its plans. Nothing is trained and no GPU is needed.
#
# The study is in `data/dense_h200x4`: a slice of Llama 3 8B on four H200s. Two plans have the telemetry that was
# recorded from them. A third ran out of memory, for the example's sake. The question is: **which plan trains fastest
# while the node draws at most 3,000 W in every second and loses at most 10 % to throttling?**

# %%
import plotly.graph_objects as go

import wattune
from wattune.report.charts import waterfall
from wattune.report.pareto import pareto

study = wattune.load_study("data/dense_h200x4")
study.space["objective"], study.space["constraints"]

# %% [markdown]
# ## Every run, as a table
#
# `metrics()` gives an Arrow table: a row for each run, a column for each metric. A metric that was not measured is
# null. The name of a metric ends in its unit, and the field's metadata has the unit too.

# %%
runs = study.metrics()
shown = ["label", "status", "quality", "tokens_per_s", "mfu_frac", "node_device_power_peak_1s_w", "throttle_loss_frac"]
runs.select(shown).to_pandas()

# %%
{name: runs.schema.field(name).metadata[b"unit"].decode() for name in shown[3:]}

# %% [markdown]
# ## The decision
#
# Data parallelism is fastest, and its peak is above the bound. The plan with tensor and pipeline parallelism keeps it.

# %%
ranking = wattune.rank(study)
for trial in ranking.trials:
    print(f"{trial.verdict:<11} {trial.label:<28} {trial.reason}")

# %%
pareto(ranking)

# %% [markdown]
# Each plan ran once. The interval of the objective is over the steps of that run, and says nothing about the variation
# from run to run. Repeats or a reference trial tell that (`measure.repeats`, `measure.reference_every`).

# %%
ranking.best.objective

# %% [markdown]
# Ask another question of the same results. Nothing runs again.

# %%
wattune.rank(study, objective="minimize energy_per_token_j", constraints=[]).best.label

# %% [markdown]
# ## The reason
#
# `compare` divides the mean step of both plans into the same parts. Their changes add up to the whole change.

# %%
best, fastest = ranking.best, ranking.infeasible[0]
comparison = wattune.compare(f"{study.path}/trials/{fastest.trial_id}", f"{study.path}/trials/{best.trial_id}")
print(comparison.conclusion)
waterfall(comparison)

# %% [markdown]
# ## The telemetry behind it
#
# `telemetry("ring")` is the driver's own power history: a sample every 20 ms for each device. The bound is on means
# over one second. Single samples go higher.

# %%
ring = study.telemetry("ring", trial_id=fastest.trial_id, columns=["device", "sensor_ns", "power_w"]).to_pandas()
ring["time_s"] = (ring.sensor_ns - ring.sensor_ns.min()) / 1e9
ring.groupby("device", observed=True).power_w.describe().round(1)

# %%
one = ring[(ring.device == "gpu0") & ring.time_s.between(10, 12)]
figure = go.Figure(go.Scatter(x=one.time_s, y=one.power_w, mode="lines+markers", name="gpu0"))
figure.update_layout(xaxis_title="seconds", yaxis_title="power of gpu0, W", height=360, template="simple_white")
figure

# %% [markdown]
# Next: `make demo` runs a study on this machine, with simulated sensors. `wattune run` does so on your GPUs.

// What the page shows, and how it asks the server.
export const here = { runs: [], run: 0, at: { tab: "overview" }, big: new Set(), open: new Set(["main", "rollout", "train"]) };

// Raises an error with `lost` when the server does not answer, and with `answered` when it says what is wrong.
export async function ask(path) {
  let answer, text;
  try {
    answer = await fetch(path);
    text = await answer.text();
  } catch (error) {
    throw Object.assign(error, { lost: true });
  }
  if (answer.ok) return JSON.parse(text);
  const told = answer.headers.get("content-type")?.includes("json") ? JSON.parse(text).error
    : `${path}: the dashboard's server failed (${answer.status}); its console has the reason`;
  throw Object.assign(new Error(told), { answered: true });
}

export const of = (part, run = here.run) => ask(`/api/runs/${run}/${part}`);

// name -> {steps, times, values, unit, meaning}
export async function metricsOf(run = here.run) {
  const { axes, metrics } = await of("metrics", run);
  return Object.fromEntries(Object.entries(metrics).map(([name, metric]) => [name, { ...metric, ...axes[metric.axis] }]));
}

// What the page shows, and how it asks the server.
export const here = { runs: [], run: 0, at: { tab: "overview" }, big: new Set(), open: new Set(["main", "rollout", "train"]) };

export async function ask(path) {
  const answer = await fetch(path);
  const content = await answer.json();
  if (!answer.ok) throw Object.assign(new Error(content.error || answer.statusText), { answered: true });
  return content;
}

export const of = (part, run = here.run) => ask(`/api/runs/${run}/${part}`);

// name -> {steps, times, values, unit, meaning}
export async function metricsOf(run = here.run) {
  const { axes, metrics } = await of("metrics", run);
  return Object.fromEntries(Object.entries(metrics).map(([name, metric]) => [name, { ...metric, ...axes[metric.axis] }]));
}

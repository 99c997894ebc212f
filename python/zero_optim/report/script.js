"use strict";
// Shows values at the pointer, on all charts of the same axis at once, and switches the colours. It draws nothing that
// the page needs, fetches nothing and remembers nothing.

const root = document.documentElement;
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : system.matches);
const nameButton = () => { button.textContent = isDark() ? "Light" : "Dark"; };
button.addEventListener("click", () => { root.dataset.theme = isDark() ? "light" : "dark"; nameButton(); });
system.addEventListener("change", nameButton);
nameButton();
button.hidden = false;

const spoken = document.createElement("div");
spoken.className = "heard";
spoken.setAttribute("aria-live", "polite");
document.body.append(spoken);

const text = (value) =>
  value === null ? "not finite"
    : value.toLocaleString("en-US", { maximumSignificantDigits: Math.abs(value) >= 1e4 ? 9 : 5, maximumFractionDigits: 5 });
const scaled = (axis, value) => (axis[2] ? Math.log(value) : value);
const place = (axis, value) => {
  const [low, high] = [scaled(axis, axis[0]), scaled(axis, axis[1])];
  return Math.min(1, Math.max(0, (scaled(axis, value) - low) / (high - low)));
};
const valueAt = (axis, share) => {
  const [low, high] = [scaled(axis, axis[0]), scaled(axis, axis[1])];
  const value = low + share * (high - low);
  return axis[2] ? Math.exp(value) : value;
};

// The index of what is nearest in a sorted list.
const nearest = (sorted, value) => {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle;
    else high = middle;
  }
  return Math.abs(sorted[low] - value) <= Math.abs(sorted[high] - value) ? low : high;
};

class Chart {
  constructor(data) {
    this.data = data;
    this.figure = document.getElementById(data.key);
    this.plot = this.figure.querySelector(".plot");
    this.outputs = [...this.figure.querySelectorAll(".legend output")];
    this.atRest = this.outputs.map((output) => output.textContent);
    this.colors = [...this.figure.querySelectorAll(".legend .key")].map((key) => key.className.split(" ")[1]);
    // Steps to move along, of the line that has most.
    this.steps = data.lines.reduce((most, line) => (line.x.length > most.length ? line.x : most), []);
  }

  stepAt(pointer) {
    const box = this.plot.getBoundingClientRect();
    const share = Math.min(1, Math.max(0, (pointer.clientX - box.left) / box.width));
    return this.steps[nearest(this.steps, valueAt(this.data.x, share))];
  }

  show(step) {
    this.clear();
    const at = this.add("cursor");
    at.style.left = `${100 * place(this.data.x, step)}%`;
    const said = this.data.lines.map((line, number) => this.showLine(line, number, step));
    this.outputs.at(-1).textContent = `${this.data.x_name} ${text(step)}`;
    return said.join(", ");
  }

  showLine(line, number, step) {
    if (!line.x.length) return "";
    const index = nearest(line.x, step);
    const value = line.y[index];
    const elsewhere = line.x[index] === step ? "" : ` (${text(line.x[index])})`;
    this.outputs[number].textContent = text(value) + elsewhere;
    if (value !== null) {
      const dot = this.add(`at ${this.colors[number]}`);
      dot.style.left = `${100 * place(this.data.x, line.x[index])}%`;
      dot.style.top = `${100 - 100 * place(this.data.y, line.top ? line.top[index] : value)}%`;
    }
    return `${line.name} ${text(value)}${elsewhere}`;
  }

  add(className) {
    const made = document.createElement("div");
    made.className = className;
    this.plot.append(made);
    return made;
  }

  clear() {
    this.plot.querySelectorAll(".cursor, .at").forEach((made) => made.remove());
    this.outputs.forEach((output, number) => { output.textContent = this.atRest[number]; });
  }
}

const charts = JSON.parse(document.getElementById("data").textContent).charts.map((data) => new Chart(data));
const alike = (chart) => charts.filter((other) => other.data.x_name === chart.data.x_name && other.steps.length);

for (const chart of charts.filter((one) => one.steps.length)) {
  let current = chart.steps.length - 1;
  const show = (step) => alike(chart).map((other) => [other, other.show(step)]);
  const clear = () => alike(chart).forEach((other) => other.clear());
  chart.plot.addEventListener("pointermove", (event) => show(chart.stepAt(event)));
  chart.plot.addEventListener("pointerdown", (event) => show(chart.stepAt(event)));
  chart.plot.addEventListener("pointerleave", clear);
  chart.plot.addEventListener("blur", clear);
  chart.plot.addEventListener("keydown", (event) => {
    const far = event.shiftKey ? 10 : 1;
    const to = { ArrowLeft: current - far, ArrowRight: current + far, Home: 0, End: chart.steps.length - 1 }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    current = Math.min(chart.steps.length - 1, Math.max(0, to));
    const step = chart.steps[current];
    const said = show(step).find(([other]) => other === chart)[1];
    spoken.textContent = `${chart.data.x_name} ${step}: ${said}`;
  });
}

// Trains a byte-level transformer and writes text with it. `train/` is one whole
// training step, `decode/` one token against the cache; both see the same weights.

import { open, openDevice } from "./shaderdsl.js";

const $ = (id) => document.getElementById(id);
const READ_EVERY = 5; // steps between two readings of the loss
const losses = []; // [step, nats a byte]

function problem(error) {
  $("problem").textContent = error.message;
  if (!document.body.dataset.state) $("about").textContent = "";
  document.body.dataset.state = "refused";
}

/** A batch of random windows: inputs, and the same one byte later. */
function batch(text, { batch: rows, length }) {
  const inputs = new Int32Array(rows * length);
  const labels = new Int32Array(rows * length);
  for (let row = 0; row < rows; row++) {
    const start = Math.floor(Math.random() * (text.length - length));
    for (let k = 0; k < length; k++) {
      inputs[row * length + k] = text[start + k];
      labels[row * length + k] = text[start + k + 1];
    }
  }
  return { inputs, labels };
}

/** An index drawn from softmax(logits / temperature); the greatest at 0. */
function draw(logits, temperature) {
  let best = 0;
  for (let k = 1; k < logits.length; k++) if (logits[k] > logits[best]) best = k;
  if (!(temperature > 0)) return best;
  const weights = Array.from(logits, (x) => Math.exp((x - logits[best]) / temperature));
  let left = Math.random() * weights.reduce((a, b) => a + b, 0);
  for (let k = 0; k < weights.length; k++) if ((left -= weights[k]) <= 0) return k;
  return best;
}

/** The losses as a curve, with a scale of its own. */
function plot(steps) {
  const canvas = $("curve");
  const scale = devicePixelRatio;
  const width = (canvas.width = canvas.clientWidth * scale);
  const height = (canvas.height = canvas.clientHeight * scale);
  const style = getComputedStyle(canvas);
  const paint = canvas.getContext("2d");
  const left = 48 * scale;
  const bottom = height - 28 * scale;
  const top = 10 * scale;
  const most = Math.max(6, ...losses.map(([, loss]) => loss));
  const x = (step) => left + (step / steps) * (width - left - 12 * scale);
  const y = (loss) => bottom - (loss / most) * (bottom - top);
  paint.font = `${12 * scale}px system-ui, sans-serif`;
  paint.fillStyle = style.color;
  paint.strokeStyle = style.getPropertyValue("--line");
  paint.textBaseline = "middle";
  for (let loss = 0; loss <= most; loss++) {
    paint.fillText(String(loss), left - 20 * scale, y(loss));
    paint.beginPath();
    paint.moveTo(left, y(loss));
    paint.lineTo(width - 12 * scale, y(loss));
    paint.stroke();
  }
  paint.textAlign = "center";
  for (let k = 0; k <= 4; k++) {
    const step = Math.round((steps * k) / 4);
    paint.fillText(String(step), x(step), bottom + 14 * scale);
  }
  paint.save();
  paint.translate(12 * scale, (top + bottom) / 2);
  paint.rotate(-Math.PI / 2);
  paint.fillText("loss, nats a byte", 0, 0);
  paint.restore();
  paint.strokeStyle = style.getPropertyValue("--accent");
  paint.lineWidth = 2 * scale;
  paint.beginPath();
  for (const [step, loss] of losses) paint.lineTo(x(step), y(loss));
  paint.stroke();
}

async function main() {
  const device = await openDevice();
  const about = await (await fetch("demo.json")).json();
  const text = new Uint8Array(await (await fetch("text.txt")).arrayBuffer());
  const training = await open("train", { device });
  const share = {};
  for (const name of about.model) share[name] = training.tensors[name];
  const decoding = await open("decode", { device, share });
  $("about").textContent =
    `${about.parameters.toLocaleString("en")} parameters; a step of ${about.batch} × ` +
    `${about.length} bytes is ${training.plan.kernels.length} kernels, a token ` +
    `${decoding.plan.kernels.length}. Nothing leaves this page.`;
  document.querySelector("main").hidden = false;

  let step = about.step;
  let running = false;
  let writing = false;
  plot(about.steps);

  async function train() {
    running = true;
    $("train").textContent = "Pause";
    const begin = performance.now();
    const first = step;
    let mark = step;
    training.set({ total: 0 });
    while (running && step < about.steps) {
      training.run(batch(text, about));
      step += 1;
      if ((step - first) % READ_EVERY && step < about.steps) continue;
      const loss = (await training.read("total"))[0] / (step - mark);
      training.set({ total: 0 });
      mark = step;
      losses.push([step, loss]);
      const speed = ((step - first) * 1000) / (performance.now() - begin);
      $("progress").textContent =
        `step ${step} of ${about.steps}, loss ${loss.toFixed(3)}, ${speed.toFixed(1)} steps/s`;
      document.body.dataset.step = step;
      document.body.dataset.loss = loss;
      document.body.dataset.first ??= loss;
      if (!Number.isFinite(loss)) throw new Error(`the loss is ${loss} at step ${step}`);
      plot(about.steps);
      await new Promise((next) => setTimeout(next));
    }
    running = false;
    $("train").textContent = step < about.steps ? "Train on" : "Trained";
    $("train").disabled = step >= about.steps;
  }

  async function generate() {
    if (writing) return;
    writing = true;
    const temperature = Number($("temperature").value);
    const bytes = [...new TextEncoder().encode($("prompt").value || " ")];
    bytes.splice(0, Math.max(0, bytes.length - about.positions + 1));
    const prompt = bytes.length;
    const begin = performance.now();
    for (let at = 0; at < about.positions - 1; at++) {
      decoding.run({ ids: bytes[at], start: at });
      if (at + 1 < prompt) continue;
      bytes.push(draw(await decoding.read("0"), temperature));
      $("text").textContent = new TextDecoder().decode(new Uint8Array(bytes));
      const made = bytes.length - prompt;
      const speed = (made * 1000) / (performance.now() - begin);
      $("speed").textContent = `${speed.toFixed(0)} bytes/s`;
    }
    document.body.dataset.bytes = bytes.length;
    writing = false;
  }

  const guarded = (work) => () => work().catch(problem);
  $("train").onclick = () => (running ? (running = false) : guarded(train)());
  $("form").onsubmit = (event) => {
    event.preventDefault();
    guarded(generate)();
  };
  addEventListener("resize", () => plot(about.steps));
  document.body.dataset.state = "ready";
  // #run does both at once, for those who only watch.
  if (location.hash === "#run") {
    await train();
    await generate();
    document.body.dataset.state = "ran";
  }
}

main().catch(problem);

// Runs what `sd.export_web` wrote on navigator.gpu. No dependencies.
//
//   import { open } from "./shaderdsl.js";
//   const step = await open("./");          // plan, kernels, weights
//   step.run({ ids, labels });              // typed arrays, arrays or numbers
//   const loss = await step.read("2");      // a typed array
//
// Inputs that are donated are state: a call leaves there what it made of them, and the
// next call goes on from that. Everything is asynchronous but run(): reading waits.

const ALIGNMENT = 256; // of parameter blocks, in bytes

/** What the messages of this module are thrown as. */
export class ShaderError extends Error {
  name = "ShaderError";
}

/** A sentence saying why WebGPU cannot be used here, or null where it can. */
export async function unavailable() {
  if (!globalThis.isSecureContext)
    return "WebGPU needs a secure page: serve it from https:// or from localhost.";
  if (!navigator.gpu)
    return "This browser has no WebGPU. Current versions of Chrome, Edge, Safari and Firefox have it.";
  try {
    if (await navigator.gpu.requestAdapter()) return null;
  } catch {
    // Some browsers throw where others give nothing.
  }
  return "This browser has WebGPU, but found no graphics adapter that it may use.";
}

/** A device with the limits that every browser guarantees. */
export async function openDevice() {
  const reason = await unavailable();
  if (reason) throw new ShaderError(reason);
  const adapter = await navigator.gpu.requestAdapter();
  return adapter.requestDevice();
}

/**
 * Load an exported folder.
 *
 * @param folder its URL.
 * @param options.device a GPUDevice; programs that share memory need the same one.
 * @param options.share {input: tensor of another program}, from its `tensors`: that
 *   memory is used, and nothing is loaded for it.
 * @param options.progress called with the fraction of the weights that has arrived.
 */
export async function open(folder, { device, share = {}, progress } = {}) {
  const page = globalThis.document?.baseURI ?? globalThis.location.href; // or a worker's
  const base = new URL(folder.endsWith("/") ? folder : folder + "/", page);
  const plan = await (await get(new URL("plan.json", base))).json();
  if (plan.format !== "shaderdsl-web" || plan.version !== 1)
    throw new ShaderError(`${base} holds no plan that this version can run`);
  const program = new Program(plan, device ?? (await openDevice()));
  await program.load(base, share, progress);
  return program;
}

class Program {
  /** Where each input lies: what `share` of another program takes. */
  tensors = {};

  constructor(plan, device) {
    this.plan = plan;
    this.device = device;
    this.name = plan.name;
    this.inputs = new Map(plan.inputs.map((entry) => [entry.name, entry]));
    this.outputs = new Map(plan.outputs.map((entry) => [entry.name, entry]));
    this.missing = new Set();
    this.calls = 0;
    device.lost.then((info) => {
      this.failure ??= `The graphics device was lost: ${info.message || info.reason}.`;
    });
    device.addEventListener("uncapturederror", (event) => {
      this.failure ??= `The browser refused a call: ${event.error.message}`;
    });
  }

  async load(base, share, progress) {
    const { plan, device } = this;
    const shared = this.#shared(share);
    device.pushErrorScope("out-of-memory");
    this.slots = plan.slots.map(
      (size, slot) =>
        shared.get(slot) ?? { buffer: this.#buffer(size), offset: 0, size, own: true },
    );
    const full = await device.popErrorScope();
    if (full) {
      const bytes = plan.slots.reduce((a, b) => a + b, 0).toLocaleString("en");
      throw new ShaderError(`The graphics device has no room for ${bytes} bytes.`);
    }
    for (const entry of plan.inputs) {
      const { buffer, offset, size } = this.slots[entry.slot];
      this.tensors[entry.name] = { ...entry, buffer, offset: offset + entry.offset, size };
      if (entry.initial === null && !shared.has(entry.slot)) this.missing.add(entry.name);
    }
    const texts = new Map(plan.kernels.map((kernel) => [kernel.file, null]));
    await Promise.all([
      ...[...texts.keys()].map(async (file) => {
        texts.set(file, await (await get(new URL(file, base))).text());
      }),
      this.#weights(base, share, progress),
    ]);
    await this.#compile(texts);
  }

  /**
   * Set inputs, {name: values}: typed arrays, nested arrays or numbers; f16 as numbers.
   */
  set(values) {
    for (const [name, value] of Object.entries(values)) {
      const entry = this.inputs.get(name);
      if (!entry)
        throw new ShaderError(
          `${this.name} has no input '${name}'; it has ${[...this.inputs.keys()].join(", ")}`,
        );
      const data = encoded(entry, value);
      const { buffer, offset } = this.tensors[name];
      if (data.byteLength) this.device.queue.writeBuffer(buffer, offset, data);
      this.missing.delete(name);
    }
  }

  /** Set inputs and launch a call; returns at once. */
  run(values = {}) {
    this.set(values);
    if (this.failure) throw new ShaderError(this.failure);
    if (this.missing.size)
      throw new ShaderError(`no value for the input ${[...this.missing].join(", ")}`);
    const encoder = this.device.createCommandEncoder();
    for (const move of this.plan.before) this.#copy(encoder, move);
    const pass = encoder.beginComputePass();
    for (const { pipeline, group, workgroups } of this.steps) {
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...workgroups);
    }
    pass.end();
    for (const move of this.plan.after) this.#copy(encoder, move);
    this.device.queue.submit([encoder.finish()]);
    this.calls += 1;
    // What was donated and is not handed on has been overwritten.
    for (const name of this.consumed) this.missing.add(name);
  }

  /** The values of a result of the last call, or of an input. */
  async read(name) {
    const entry = this.outputs.get(name) ?? this.inputs.get(name);
    if (!entry)
      throw new ShaderError(
        `${this.name} has no result '${name}'; it has ${[...this.outputs.keys()].join(", ")}`,
      );
    if (this.outputs.has(name) && !entry.feeds && !this.calls)
      throw new ShaderError(`'${name}' is not there before the first call`);
    const count = elements(entry);
    const bytes = Math.ceil((count * itemSize(entry.dtype)) / 4) * 4;
    if (!bytes) return decoded(entry, new ArrayBuffer(0), 0);
    const { buffer, offset } = this.slots[entry.slot];
    const staging = this.device.createBuffer({
      size: bytes,
      usage: GPUBufferUsage.MAP_READ | GPUBufferUsage.COPY_DST,
    });
    const encoder = this.device.createCommandEncoder();
    encoder.copyBufferToBuffer(buffer, offset + entry.offset, staging, 0, bytes);
    this.device.queue.submit([encoder.finish()]);
    try {
      await staging.mapAsync(GPUMapMode.READ);
    } catch (error) {
      throw new ShaderError(this.failure ?? error.message);
    }
    if (this.failure) throw new ShaderError(this.failure);
    const copy = staging.getMappedRange().slice(0);
    staging.destroy();
    return decoded(entry, copy, count);
  }

  /** Resolves when everything that was launched has run. */
  async done() {
    await this.device.queue.onSubmittedWorkDone();
    if (this.failure) throw new ShaderError(this.failure);
  }

  /** Free the memory; what is shared belongs to the program that made it. */
  destroy() {
    for (const slot of this.slots) if (slot.own) slot.buffer.destroy();
  }

  #buffer(size) {
    return this.device.createBuffer({
      size: Math.max(16, size),
      usage: GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST,
    });
  }

  /** Slots whose memory another program has. */
  #shared(share) {
    const found = new Map();
    for (const [name, tensor] of Object.entries(share)) {
      const entry = this.inputs.get(name);
      if (!entry) throw new ShaderError(`${this.name} has no input '${name}' to share`);
      if (entry.dtype !== tensor.dtype || `${entry.shape}` !== `${tensor.shape}`)
        throw new ShaderError(
          `'${name}' is ${entry.dtype}[${entry.shape}] in ${this.name}, what it would ` +
            `share is ${tensor.dtype}[${tensor.shape}]`,
        );
      const others = this.plan.inputs.filter((other) => other.slot === entry.slot);
      if (others.length > 1 || entry.donated)
        throw new ShaderError(
          `'${name}' is changed by ${this.name}: let the other program share this one's`,
        );
      const { buffer, offset, size } = tensor;
      found.set(entry.slot, { buffer, offset, size: size - offset });
    }
    return found;
  }

  async #weights(base, share, progress) {
    const { plan, device } = this;
    for (const [k, file] of plan.weights.entries()) {
      const response = await get(new URL(file, base));
      const bytes = await response.arrayBuffer();
      const length = Number(new DataView(bytes).getBigUint64(0, true));
      const header = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 8, length)));
      for (const [name, { data_offsets }] of Object.entries(header)) {
        if (name in share) continue;
        const [start, stop] = data_offsets.map((at) => at + 8 + length);
        const { buffer, offset } = this.tensors[name];
        const whole = start + Math.floor((stop - start) / 4) * 4;
        device.queue.writeBuffer(buffer, offset, bytes, start, whole - start);
        if (stop > whole) {
          const rest = new Uint8Array(4); // transfers move whole words
          rest.set(new Uint8Array(bytes, whole, stop - whole));
          device.queue.writeBuffer(buffer, offset + whole - start, rest);
        }
      }
      progress?.((k + 1) / plan.weights.length);
    }
  }

  async #compile(texts) {
    const { plan, device } = this;
    const { words, ranges } = parameters(plan.kernels);
    const uniform = words.length
      ? device.createBuffer({
          size: words.byteLength,
          usage: GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST,
        })
      : null;
    if (uniform) device.queue.writeBuffer(uniform, 0, words);
    const layouts = new Map();
    const layoutOf = (kernel) => {
      const types = kernel.access.map((access) =>
        access === "read" ? "read-only-storage" : "storage",
      );
      if (kernel.params.length) types.push("uniform");
      const key = types.join();
      if (!layouts.has(key)) {
        const group = device.createBindGroupLayout({
          entries: types.map((type, binding) => ({
            binding,
            visibility: GPUShaderStage.COMPUTE,
            buffer: { type },
          })),
        });
        const layout = device.createPipelineLayout({ bindGroupLayouts: [group] });
        layouts.set(key, { key, group, layout });
      }
      return layouts.get(key);
    };
    const pipelines = new Map();
    const pipelineOf = (kernel, { key, layout }) => {
      const name = kernel.file + " " + key;
      if (!pipelines.has(name)) {
        const module = device.createShaderModule({
          label: kernel.name,
          code: texts.get(kernel.file),
        });
        const made = device.createComputePipelineAsync({
          label: kernel.name,
          layout,
          compute: { module, entryPoint: "main" },
        });
        pipelines.set(
          name,
          made.catch(async (error) => {
            const info = await module.getCompilationInfo();
            const lines = info.messages.map((m) => `${m.lineNum}: ${m.message}`);
            throw new ShaderError(
              [`The browser refused ${kernel.file}: ${error.message}`, ...lines].join("\n"),
            );
          }),
        );
      }
      return pipelines.get(name);
    };
    this.steps = await Promise.all(
      plan.kernels.map(async (kernel, number) => {
        const layout = layoutOf(kernel);
        const entries = kernel.bind.map(([slot, at, wanted], binding) => {
          const { buffer, offset, size } = this.slots[slot];
          return {
            binding,
            resource: { buffer, offset: offset + at, size: Math.min(wanted, size - at) },
          };
        });
        if (ranges[number]) {
          const [offset, size] = ranges[number];
          entries.push({ binding: entries.length, resource: { buffer: uniform, offset, size } });
        }
        const pipeline = await pipelineOf(kernel, layout);
        const group = device.createBindGroup({ layout: layout.group, entries });
        return { pipeline, group, workgroups: kernel.workgroups };
      }),
    );
    const fed = new Set(plan.outputs.map((entry) => entry.feeds));
    this.consumed = plan.inputs
      .filter((entry) => entry.donated && !fed.has(entry.name))
      .map((entry) => entry.name);
  }

  #copy(encoder, [from, start, to, at, bytes]) {
    const source = this.slots[from];
    const target = this.slots[to];
    encoder.copyBufferToBuffer(
      source.buffer,
      source.offset + start,
      target.buffer,
      target.offset + at,
      bytes,
    );
  }
}

async function get(url) {
  const response = await fetch(url);
  if (!response.ok)
    throw new ShaderError(`${url} could not be loaded: ${response.status} ${response.statusText}`);
  return response;
}

/** All kernels' parameters in one buffer; equal blocks are stored once. */
function parameters(kernels) {
  const seen = new Map();
  const words = [];
  const ranges = kernels.map(({ params }) => {
    if (!params.length) return null;
    const key = params.join();
    if (!seen.has(key)) {
      while ((words.length * 4) % ALIGNMENT) words.push(0);
      const start = words.length;
      words.push(...params);
      while (words.length % 4) words.push(0);
      seen.set(key, [start * 4, (words.length - start) * 4]);
    }
    return seen.get(key);
  });
  return { words: new Uint32Array(words), ranges };
}

const elements = ({ shape }) => shape.reduce((a, b) => a * b, 1);
const itemSize = (dtype) => (dtype === "f16" ? 2 : 4);
const ARRAYS = { f32: Float32Array, i32: Int32Array, u32: Uint32Array, bool: Uint32Array, f16: Uint16Array };
const RANGES = { i32: [-(2 ** 31), 2 ** 31 - 1], u32: [0, 2 ** 32 - 1] };

/** Values as the device stores them, in whole words. */
function encoded(entry, value) {
  const { name, dtype } = entry;
  const typed = ArrayBuffer.isView(value);
  const flat = typed ? value : Array.isArray(value) ? value.flat(Infinity) : [Number(value)];
  const count = elements(entry);
  if (flat.length !== count)
    throw new ShaderError(`'${name}' takes ${count} values, ${dtype}[${entry.shape}], got ${flat.length}`);
  const whole = dtype === "i32" || dtype === "u32";
  const exact = typed && flat instanceof ARRAYS[dtype];
  if (whole && !exact) {
    const [low, high] = RANGES[dtype];
    for (const v of flat)
      if (!Number.isInteger(v) || v < low || v > high)
        throw new ShaderError(`'${name}' takes ${dtype} values, got ${v}`);
  }
  if (entry.below !== undefined)
    for (const v of flat)
      if (!(v >= 0 && v < entry.below))
        throw new ShaderError(`'${name}' holds the id ${v}; ids are 0 to ${entry.below - 1}`);
  const padded = new ARRAYS[dtype](dtype === "f16" ? count + (count % 2) : count);
  if (dtype === "f16") flat.forEach((v, k) => (padded[k] = toHalf(v)));
  else if (dtype === "bool") flat.forEach((v, k) => (padded[k] = v ? 1 : 0));
  else padded.set(flat);
  return padded;
}

function decoded({ dtype }, bytes, count) {
  const array = new ARRAYS[dtype](bytes, 0, count);
  if (dtype === "f16") return Float32Array.from(array, fromHalf);
  if (dtype === "bool") return Uint8Array.from(array);
  return array;
}

const scratch = new DataView(new ArrayBuffer(4));

/** A number as f16 bits, rounded to nearest, ties to even. */
function toHalf(value) {
  const sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  scratch.setFloat32(0, size);
  const exponent = Math.max((scratch.getUint32(0) >>> 23) - 127, -14);
  const unit = 2 ** (exponent - 10);
  const steps = size / unit;
  let rounded = Math.floor(steps);
  const rest = steps - rounded;
  if (rest > 0.5 || (rest === 0.5 && rounded % 2)) rounded += 1;
  return sign | (((exponent + 14) << 10) + rounded);
}

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  if (!exponent) return sign * fraction * 2 ** -24;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

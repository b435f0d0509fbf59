// Requests, answered by the server or, in an exported file, by the elements it carries under the same addresses; and
// the reader of the capture format (safetensors, docs/capture.md).

const held = new Map();
for (const element of document.querySelectorAll("script[data-key]")) held.set(element.dataset.key, element);

export const exported = held.size > 0;

async function unpack(element) {
  const bytes = Uint8Array.from(atob(element.textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).arrayBuffer();
}

const sorted = (value) =>
  value && typeof value === "object" && !Array.isArray(value)
    ? Object.fromEntries(Object.keys(value).sort().map((key) => [key, sorted(value[key])]))
    : value;

async function fetched(address, body) {
  let answer;
  try {
    answer = await fetch(address, body && {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    });
  } catch {
    throw new Error("The server does not answer. Is `relpos explore` still running?");
  }
  if (answer.ok) return answer.arrayBuffer();
  let message = `The server answered ${answer.status}.`;
  try { message = (await answer.json()).error || message; } catch { /* no JSON: the status says enough */ }
  throw new Error(message);
}

async function carried(address, body) {
  const key = body ? `${address} ${JSON.stringify(sorted(body))}` : address;
  const element = held.get(key);
  if (!element) throw new Error("This exported page does not hold that. Open it with `relpos explore` to see all.");
  const buffer = await unpack(element);
  if (new Uint8Array(buffer, 0, 1)[0] === 123 && body) throw new Error(JSON.parse(new TextDecoder().decode(buffer)).error);
  return buffer;
}

const bytes = (address, body) => (exported ? carried : fetched)(address, body);

export const json = async (address, body) => JSON.parse(new TextDecoder().decode(await bytes(address, body)));

const TYPES = { F32: Float32Array, U16: Uint16Array, I32: Int32Array };

/** A capture file: its tensors by name, each { data, shape }, and what its metadata says about the maps in it. */
export function parse(buffer) {
  const size = Number(new DataView(buffer).getBigUint64(0, true));
  const { __metadata__: metadata, ...entries } = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, size)));
  if (metadata.format !== "relpos-capture") throw new Error("The answer is no capture.");
  const tensors = {};
  for (const [name, { dtype, shape, data_offsets: [begin, end] }] of Object.entries(entries)) {
    tensors[name] = { data: new TYPES[dtype](buffer.slice(8 + size + begin, 8 + size + end)), shape };
  }
  return { tensors, facts: JSON.parse(metadata.maps) };
}

// Answers that were just used stay at hand: walking back and forth asks for nothing twice.
const KEPT = 40;
const kept = new Map();

/** A parsed capture from an address; the same promise while it is kept. */
export function capture(address, body) {
  if (body) return bytes(address, body).then(parse);
  if (!kept.has(address)) {
    const made = bytes(address).then(parse);
    made.catch(() => kept.delete(address));
    kept.set(address, made);
    if (kept.size > KEPT) kept.delete(kept.keys().next().value);
  } else {
    const made = kept.get(address);
    kept.delete(address);
    kept.set(address, made);
  }
  return kept.get(address);
}

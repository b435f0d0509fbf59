// PNG, SVG and npz of what is shown. A picture is composed as SVG (maps as images, text as text); the PNG is that SVG,
// drawn. An npz is a zip of npy files, stored.

import { number, strip } from "relpos/maps.js";
import { node } from "relpos/plots.js";

function download(name, blob) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

/** A sheet of maps as SVG. panels: { maps, h, title }. */
export function sheet(panels, { title, caption, shared, palette, columns }) {
  const size = panels.length > 3 ? 190 : 380, across = columns || Math.min(4, panels.length), tall = size + 58;
  const width = across * (size + 16) + 16, height = Math.ceil(panels.length / across) * tall + 70;
  const svg = node("svg", { xmlns: "http://www.w3.org/2000/svg", viewBox: `0 0 ${width} ${height}`, width, height, "font-family": "sans-serif", "font-size": 12, fill: "#111" });
  svg.append(node("rect", { width, height, fill: "#fff" }), node("text", { x: 16, y: 24, "font-size": 15, "font-weight": "bold" }, title));
  panels.forEach(({ maps, h, title: name }, place) => {
    const x = 16 + (place % across) * (size + 16), y = 42 + Math.floor(place / across) * tall;
    const canvas = maps.paint(document.createElement("canvas"), h, shared, palette);
    const norm = maps.norm(h, shared), bar = document.createElement("canvas");
    strip(bar, norm, palette);
    const image = (from, top, tallness) => node("image", { x, y: top, width: size, height: tallness, preserveAspectRatio: "none", href: from.toDataURL(), style: "image-rendering:pixelated" });
    svg.append(node("text", { x, y: y + 10 }, name), image(canvas, y + 15, size), image(bar, y + size + 19, 6),
      node("text", { x, y: y + size + 37, "font-size": 11 }, number(norm.low)),
      node("text", { x: x + size, y: y + size + 37, "font-size": 11, "text-anchor": "end" }, number(norm.high)));
  });
  svg.append(node("text", { x: 16, y: height - 10, "font-size": 10, fill: "#444" }, caption.slice(0, Math.floor(width / 5.2))));
  return svg;
}

const written = (svg) => {
  const copy = svg.cloneNode(true);
  copy.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  if (!copy.hasAttribute("width")) {
    const [, , width, height] = copy.getAttribute("viewBox").split(" ");
    copy.setAttribute("width", width); copy.setAttribute("height", height);
    copy.setAttribute("style", "background:#fff;color:#111");
  }
  return new XMLSerializer().serializeToString(copy);
};

export const saveSvg = (name, svg) => download(`${name}.svg`, new Blob([written(svg)], { type: "image/svg+xml" }));

export async function savePng(name, svg) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(written(svg))}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = 2 * image.width; canvas.height = 2 * image.height;
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  download(`${name}.png`, await new Promise((done) => canvas.toBlob(done)));
}

const CRC = Uint32Array.from({ length: 256 }, (_, n) => { for (let k = 0; k < 8; k++) n = n & 1 ? 0xedb88320 ^ (n >>> 1) : n >>> 1; return n; });
const crc = (bytes) => { let c = -1; for (const byte of bytes) c = CRC[(c ^ byte) & 255] ^ (c >>> 8); return (c ^ -1) >>> 0; };
const DTYPES = new Map([[Float32Array, "<f4"], [Float64Array, "<f8"], [Int32Array, "<i4"]]);

function npy({ data, shape }) {
  let header = `{'descr': '${DTYPES.get(data.constructor)}', 'fortran_order': False, 'shape': (${shape.join(", ")}${shape.length === 1 ? "," : ""}), }`;
  header += " ".repeat((64 - ((11 + header.length) % 64)) % 64) + "\n";
  const out = new Uint8Array(10 + header.length + data.byteLength);
  out.set([0x93, 0x4e, 0x55, 0x4d, 0x50, 0x59, 1, 0, header.length & 255, header.length >> 8]);
  out.set(new TextEncoder().encode(header), 10);
  out.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), 10 + header.length);
  return out;
}

/** arrays: name -> { data, shape }. */
export function saveNpz(name, arrays) {
  const parts = [], directory = [];
  let offset = 0;
  for (const [key, array] of Object.entries(arrays)) {
    const file = new TextEncoder().encode(`${key}.npy`), data = npy(array), sum = crc(data);
    const head = (central) => {
      const out = new DataView(new ArrayBuffer((central ? 46 : 30) + file.length));
      out.setUint32(0, central ? 0x02014b50 : 0x04034b50, true);
      let at = 4;
      if (central) { out.setUint16(at, 20, true); at += 2; }
      out.setUint16(at, 20, true); out.setUint16(at + 8, 33, true); // version; 1 January 1980
      out.setUint32(at + 10, sum, true); out.setUint32(at + 14, data.length, true); out.setUint32(at + 18, data.length, true);
      out.setUint16(at + 22, file.length, true);
      if (central) out.setUint32(42, offset, true);
      const bytes = new Uint8Array(out.buffer);
      bytes.set(file, central ? 46 : 30);
      return bytes;
    };
    directory.push(head(true));
    parts.push(head(false), data);
    offset += 30 + file.length + data.length;
  }
  const size = directory.reduce((sum, part) => sum + part.length, 0);
  const end = new DataView(new ArrayBuffer(22));
  end.setUint32(0, 0x06054b50, true);
  end.setUint16(8, directory.length, true); end.setUint16(10, directory.length, true);
  end.setUint32(12, size, true); end.setUint32(16, offset, true);
  download(`${name}.npz`, new Blob([...parts, ...directory, end.buffer], { type: "application/zip" }));
}

/** Maps of all heads as one array [H, n, n]. */
export function stacked(maps) {
  const data = new Float32Array(maps.heads.length * maps.n * maps.n);
  maps.heads.forEach((_, h) => data.set(maps.array(h), h * maps.n * maps.n));
  return { data, shape: [maps.heads.length, maps.n, maps.n] };
}

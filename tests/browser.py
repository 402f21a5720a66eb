"""A headless Chromium for tests: serves a folder, opens a page, waits for what the page
posts to ``/result``.
"""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import queue
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)

#: WebGPU on the browser's own software driver, which needs no GPU.
WEBGPU = ("--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader")

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--no-first-run",
    "--disable-gpu-sandbox",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
)


class _Handler(http.server.SimpleHTTPRequestHandler):
    extensions_map = http.server.SimpleHTTPRequestHandler.extensions_map | {
        ".js": "text/javascript",
        ".wgsl": "text/plain",
    }

    def __init__(self, *args, results, **keywords):
        self.results = results
        super().__init__(*args, **keywords)

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.results.put(json.loads(body))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@contextlib.contextmanager
def serving(folder: Path):
    """``(address, results)`` of a server of a folder."""
    results: queue.Queue = queue.Queue()
    handler = functools.partial(_Handler, directory=str(folder), results=results)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", results
        finally:
            server.shutdown()
            thread.join()


def visit(folder: Path, page: str, timeout: float = 120, flags=WEBGPU):
    """What ``page`` (a path in ``folder``) posts to ``/result``, as JSON."""
    with (
        serving(folder) as (address, results),
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile,
    ):
        command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}"]
        with open(Path(profile) / "log", "wb") as log:
            process = subprocess.Popen(
                [*command, f"{address}/{page}"], stdout=log, stderr=subprocess.STDOUT
            )
            try:
                return results.get(timeout=timeout)
            except queue.Empty:
                tail = (Path(profile) / "log").read_bytes()[-2000:].decode()
                raise AssertionError(f"no result in {timeout} s:\n{tail}") from None
            finally:
                process.terminate()
                process.wait(20)


#: Opens a page in a frame and waits until it says that it ran, or that it cannot.
SHOWN = """
const shown = (page) =>
  new Promise((resolve) => {
    const frame = document.createElement("iframe");
    frame.style = "width: 900px; height: 900px";
    frame.src = page + "/index.html#run";
    document.body.append(frame);
    const look = () => {
      const inside = frame.contentDocument;
      const { state } = inside?.body?.dataset ?? {};
      if (state !== "ran" && state !== "refused") return setTimeout(look, 100);
      const canvas = inside.querySelector("canvas");
      let ink = 0;
      if (canvas) {
        const { width, height } = canvas;
        const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
        for (let k = 0; k < data.length; k += 4)
          if (data[k + 3] > 128 && data[k + 2] > data[k] + 80) ink += 1;
      }
      resolve({
        ...inside.body.dataset,
        problem: inside.getElementById("problem").textContent,
        text: inside.body.innerText,
        ink,
      });
    };
    look();
  });
"""

#: Shows one page and posts what became of it.
ONE_PAGE = f"""<!doctype html><meta charset="utf-8"><body><script type="module">
{SHOWN}
const answer = JSON.stringify(await shown("single"));
await fetch("result", {{ method: "POST", body: answer }});
</script></body>
"""

#: Opens folders, makes calls, shows pages and posts what they gave, in base64.
PAGE = (
    """<!doctype html><meta charset="utf-8"><body><script type="module">
import { open, openDevice } from "./runtime/shaderdsl.js";
"""
    + SHOWN
    + """
const base64 = (array) => {
  const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
  let text = "";
  for (const b of bytes) text += String.fromCharCode(b);
  return btoa(text);
};
let answer;
try {
  const device = await openDevice();
  const cases = await (await fetch("cases.json")).json();
  const made = {};
  answer = { results: [], pages: {} };
  for (const { name, share, calls, reads } of cases) {
    try {
      const shared = {};
      for (const [input, [other, theirs]] of Object.entries(share))
        shared[input] = made[other].tensors[theirs];
      const program = (made[name] = await open(name, { device, share: shared }));
      const results = [];
      for (const inputs of calls) {
        program.run(inputs);
        const values = {};
        for (const one of reads) {
          const array = await program.read(one);
          values[one] = [array.constructor.name, base64(array)];
        }
        results.push(values);
      }
      answer.results.push(results);
    } catch (error) {
      answer.results.push({ error: `${error.name}: ${error.message}` });
    }
  }
  for (const page of ["single", "demo"]) answer.pages[page] = await shown(page);
} catch (error) {
  answer = { error: `${error.name}: ${error.message}\\n${error.stack}` };
}
await fetch("result", { method: "POST", body: JSON.stringify(answer) });
</script></body>
"""
)

#: Asks the browser's compiler about every text of ``texts.json``.
VALIDATE = """<!doctype html><meta charset="utf-8"><script type="module">
const adapter = await navigator.gpu.requestAdapter();
const wanted = ["subgroups"].filter((name) => adapter.features.has(name));
const device = await adapter.requestDevice({ requiredFeatures: wanted });
const refused = [];
for (const [name, code] of await (await fetch("texts.json")).json()) {
  device.pushErrorScope("validation");
  const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
  const error = await device.popErrorScope();
  if (error || messages.length)
    refused.push([name, error?.message, ...messages.map((m) => m.message)]);
}
const answer = JSON.stringify({ refused, subgroups: wanted.length > 0 });
await fetch("result", { method: "POST", body: answer });
</script>
"""

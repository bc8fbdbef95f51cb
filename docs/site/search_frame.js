// Browsers start no web worker on a page that is opened as a file. On such a page, the worker's script runs in a hidden
// frame.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      this.inside = this.frame.contentWindow;
      this.inside.postMessage = (data) => {
        const copy = structuredClone(data); // messages to a worker are copied as well
        setTimeout(() => this.onmessage?.({ data: copy }));
      };
      const script = this.inside.document.createElement("script");
      this.ready = new Promise((resolve) => (script.onload = resolve));
      script.src = new URL(url, location);
      this.inside.document.body.append(script);
    }
    async postMessage(data) {
      const copy = structuredClone(data);
      await this.ready;
      this.inside.onmessage({ data: copy });
    }
    terminate() {
      this.frame.remove();
    }
  };
}

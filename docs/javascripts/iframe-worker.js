// Search in the site opened from a folder: browsers start no worker from a file, so its script runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inner = frame.contentWindow;
      const load = source => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        Object.assign(script, { src: source, onload: resolve, onerror: reject });
        inner.document.head.append(script);
      });
      inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = (...sources) => sources.reduce((before, each) => before.then(() => load(each)), Promise.resolve());
      this.inner = inner;
      this.ready = load(url);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new this.inner.MessageEvent("message", { data })));
    }
    terminate() {}
  };
}

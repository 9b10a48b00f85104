// Browsers start no Worker for pages of a folder (file://). This one runs its script in a hidden frame instead; the
// script of the search looks for the name IFrameWorker.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.body.appendChild(document.createElement("iframe"));
      frame.hidden = true;
      this.inner = frame.contentWindow;
      this.inner.document.open();
      this.inner.document.write("<!DOCTYPE html><body></body>");
      this.inner.document.close();
      this.inner.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = this.inner.document.createElement("script");
      script.src = url;
      this.ready = new Promise(done => { script.onload = done; });
      this.inner.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}

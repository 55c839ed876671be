/* SPDX-License-Identifier: Apache-2.0 */

/* The theme searches in a Worker, which browsers do not start for pages that are opened as files: an iframe takes its place. */
if (location.protocol === "file:") {
    window.IFrameWorker = window.Worker = class extends EventTarget {
        constructor(url) {
            super();
            const frame = document.createElement("iframe");
            frame.hidden = true;
            this.scope = new Promise((ready) => {
                frame.onload = () => {
                    const script = frame.contentDocument.createElement("script");
                    frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
                    script.onload = () => ready(frame.contentWindow);
                    script.src = url;
                    frame.contentDocument.body.append(script);
                };
            });
            document.body.append(frame);
        }

        postMessage(data) {
            this.scope.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
        }
    };
}

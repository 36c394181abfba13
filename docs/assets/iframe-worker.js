// On pages opened as files browsers refuse to start a worker, and the search is one. There a hidden frame runs its
// script instead, with the three things that it asks of a worker: postMessage, message events and importScripts.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      this.waiting = []
      this.inside = inside
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = (...addresses) => Promise.all(addresses.map(each => load(inside, each)))
      load(inside, new URL(address, document.baseURI).href).then(() => {
        this.ready = true
        for (const data of this.waiting) this.deliver(data)
      })
    }

    postMessage(data) {
      if (this.ready) this.deliver(data)
      else this.waiting.push(data)
    }

    deliver(data) {
      this.inside.dispatchEvent(new this.inside.MessageEvent("message", { data }))
    }
  }

  const load = (inside, address) => new Promise((resolve, reject) => {
    const script = inside.document.createElement("script")
    script.src = address
    script.onload = resolve
    script.onerror = reject
    inside.document.body.append(script)
  })
}

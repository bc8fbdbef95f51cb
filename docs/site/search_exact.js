// Appended to the theme's search worker: results whose title equals the query come first, glossary terms before
// others. A term has an item for each of its names, and is listed once, under the name that fits the query best.
{
  const plain = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();
  const post = self.postMessage.bind(self), read = self.onmessage;
  const listed = new Set();
  let items = [], query = "";
  self.onmessage = (event) => {
    const { type, data } = event.data;
    if (type === 0) items = data.items.map(({ title, location }) => [plain(title), location.startsWith("glossary") ? 2 : 1, location]);
    if (type === 2) query = plain(data.input);
    return read(event);
  };
  const rank = ({ id }) => (items[id]?.[0] === query ? items[id][1] : 0);
  const first = ({ id }) => !listed.has(items[id]?.[2]) && listed.add(items[id]?.[2]);
  self.postMessage = (message) => {
    const found = message.data?.items;
    if (message.data?.pagination?.prev === undefined) listed.clear(); // else the next page of the same results
    if (found) message.data.items = found.sort((one, other) => rank(other) - rank(one)).filter(first);
    post(message);
  };
}

// Appended to the theme's search worker: a result whose title is the query comes first, a term of the glossary before others.
{
  const plain = (text) => text.toLowerCase().replace(/[^\p{L}\p{N}]+/gu, " ").trim();
  const post = self.postMessage.bind(self), read = self.onmessage;
  let items = [], query = "";
  self.onmessage = (event) => {
    const { type, data } = event.data;
    if (type === 0) items = data.items.map(({ title, location }) => [plain(title), location.startsWith("glossary") ? 2 : 1]);
    if (type === 2) query = plain(data.input);
    return read(event);
  };
  const rank = ({ id }) => (items[id]?.[0] === query ? items[id][1] : 0);
  self.postMessage = (message) => {
    message.data?.items?.sort((one, other) => rank(other) - rank(one));
    post(message);
  };
}

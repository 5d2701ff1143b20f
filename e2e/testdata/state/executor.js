// node executor.js CODE: runs CODE by Executor's tool "execute", as a client
// that the box has wired, accepts what it asks for, and prints the result.
const fs = require('fs');
const { url, headers } = JSON.parse(fs.readFileSync(process.env.HOME + '/.claude.json')).mcpServers.executor;
let session, id = 0;

async function post(message) {
  const response = await fetch(url, {
    method: 'POST',
    headers: {
      'Content-Type': 'application/json', Accept: 'application/json, text/event-stream', ...headers,
      ...(session && { 'mcp-session-id': session }),
    },
    body: JSON.stringify({ jsonrpc: '2.0', ...message }),
  });
  session = response.headers.get('mcp-session-id') || session;
  const text = await response.text();
  if (!text) return undefined;
  const { result, error } = JSON.parse(text.startsWith('{') ? text : text.split('\n').filter((l) => l.startsWith('data:')).pop().slice(5));
  if (error) throw new Error(JSON.stringify(error));
  return result;
}
const call = (method, params) => post({ id: ++id, method, params });

(async () => {
  await call('initialize', { protocolVersion: '2025-06-18', capabilities: {}, clientInfo: { name: 'e2e', version: '1' } });
  await post({ method: 'notifications/initialized' });
  let result = await call('tools/call', { name: 'execute', arguments: { code: process.argv[2] } });
  while (result.structuredContent?.status === 'waiting_for_interaction') {
    result = await call('tools/call', {
      name: 'resume', arguments: { executionId: result.structuredContent.executionId, action: 'accept', content: '{}' },
    });
  }
  console.log(JSON.stringify(result.structuredContent?.result ?? result));
})();

/** The call of a column, to copy. */

import { Copied } from "../parts/basics";
import { Dialog } from "../parts/dialog";

interface CodeDialogProps {
  /** Raises for parameters from which no call can be made. */
  texts: () => [string, string][];
  onClose: () => void;
}

export function CodeDialog({ texts, onClose }: CodeDialogProps) {
  let shown: [string, string][];
  try {
    shown = texts();
  } catch (error) {
    shown = [["", (error as Error).message]];
  }
  return (
    <Dialog title="The call of this column" onClose={onClose}>
      {shown.map(([name, text]) => (
        <div key={name} class="code">
          <div class="bar">
            <strong>{name}</strong>
            <Copied text={text} />
          </div>
          <pre tabIndex={0}>{text}</pre>
        </div>
      ))}
    </Dialog>
  );
}
